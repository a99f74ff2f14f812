"""SlotAllocator from Python, against lists and a pretended cache; csrc's own fuzz plays a million.

NWOR_TEST_SEED repeats a run.
"""

from __future__ import annotations

import os
import random
import re
import secrets

import pytest
import torch

from nwor_specpv import CapacityError, NworError, SlotAllocator

STEPS = 4000


class Model:
    """Requests as lists of values; whatever the allocator says is done to a list of slots."""

    def __init__(self, rng: random.Random, num_pages: int, page_size: int) -> None:
        self.rng, self.page_size = rng, page_size
        self.allocator = SlotAllocator(num_pages, page_size)
        self.cache = [None] * (num_pages * page_size)
        self.requests: dict[int | str, list[int]] = {}
        self.saved: list[tuple] = []
        self.names = [0, 1, 2, "a", "b", "c"]
        self.next_value = 0

    def copy_pages(self) -> None:
        size = self.page_size
        for source, target in self.allocator.take_copies():
            page = self.cache[source * size : (source + 1) * size]
            self.cache[target * size : (target + 1) * size] = page

    def extend(self) -> None:
        name, count = self.rng.choice(self.names), self.rng.randrange(3 * self.page_size)
        slots = self.allocator.extend(name, count)
        self.copy_pages()
        for slot in slots.tolist():
            self.cache[slot] = self.next_value
            self.requests.setdefault(name, []).append(self.next_value)
            self.next_value += 1
        self.requests.setdefault(name, [])

    def free(self) -> None:
        name = self.rng.choice(list(self.requests))
        if self.rng.random() < 0.3:
            del self.requests[name]
            self.allocator.free(name)
            return
        values = self.requests[name]
        mask = [self.rng.random() < 0.4 for _ in range(self.rng.randrange(len(values) + 1))]
        start = len(values) - len(mask)
        kept = [v for v, gone in zip(values[start:], mask, strict=True) if not gone]
        self.requests[name] = values[:start] + kept
        self.allocator.free(name, torch.tensor(mask, dtype=torch.bool))

    def truncate(self) -> None:
        name = self.rng.choice(list(self.requests))
        length = self.rng.randrange(len(self.requests[name]) + 1)
        self.allocator.truncate(name, length)
        del self.requests[name][length:]

    def compact(self) -> None:
        name = self.rng.choice(list(self.requests))
        sources, targets = self.allocator.compact(name)
        self.copy_pages()
        moved = [self.cache[slot] for slot in sources.tolist()]
        for slot, value in zip(targets.tolist(), moved, strict=True):
            self.cache[slot] = value
        assert self.allocator.is_dense(name)

    def fork(self) -> None:
        parent = self.rng.choice(list(self.requests))
        child = self.rng.choice(self.names)
        if child not in self.requests:
            length = self.rng.randrange(len(self.requests[parent]) + 1)
            self.allocator.fork(parent, child, length)
            self.requests[child] = self.requests[parent][:length]

    def save(self) -> None:
        requests = {name: list(values) for name, values in self.requests.items()}
        self.saved = [(self.allocator.backup(), requests, list(self.cache))]

    def restore(self) -> None:
        for state, requests, cache in self.saved:
            self.allocator.restore(state)
            self.requests = {name: list(values) for name, values in requests.items()}
            self.cache = list(cache)

    def step(self) -> None:
        actions = [self.extend] * 4 + [self.save, self.restore]
        if self.requests:
            actions += [self.free, self.truncate, self.compact, self.fork]
        try:
            self.rng.choice(actions)()
        except CapacityError as error:
            need, free = map(int, re.search(r"needs (\d+), but only (\d+) of", str(error)).groups())
            # What is written anew, a page of it shared, or every page of a request to be moved.
            held = max((len(self.pages(name)) for name in self.requests), default=0)
            assert self.allocator.stats()["free_pages"] == free < need <= max(4, held)

    def pages(self, name: int | str) -> set[int]:
        return {slot // self.page_size for slot in self.allocator.slots(name).tolist()}

    def check(self) -> None:
        stats = self.allocator.stats()
        assert stats["free_slots"] + stats["held_slots"] == stats["total_slots"]
        pages = set()
        for name, values in self.requests.items():
            slots = self.allocator.slots(name).tolist()
            assert [self.cache[slot] for slot in slots] == values
            pages |= self.pages(name)
        assert stats["held_pages"] == len(pages)
        assert stats["tokens"] == sum(map(len, self.requests.values()))


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_request_reads_its_own_tokens(page_size: int) -> None:
    seed = int(os.environ.get("NWOR_TEST_SEED") or secrets.randbits(32))
    print(f"seed={seed}")
    model = Model(random.Random(seed), num_pages=24, page_size=page_size)
    for _ in range(STEPS // 3):
        model.step()
        model.check()


def test_slots_are_an_int64_tensor_and_branches_rows() -> None:
    allocator = SlotAllocator(8, 4)
    slots = allocator.extend("r", 6)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [0, 1, 2, 3, 4, 5]
    assert "r" in allocator
    assert 5 not in allocator
    assert allocator.branch("r", [1, 2], 3).tolist() == [[10, 11, 12], [18, 19, 20]]
    assert allocator.take_copies() == [(1, 2), (1, 4)]
    assert allocator.pages(1) == [0, 2, 3]


@pytest.mark.parametrize("taken", [False, True])
def test_going_on_to_a_newer_backup_still_owes_its_copies(taken: bool) -> None:
    allocator = SlotAllocator(8, 4)
    allocator.extend("p", 2)
    allocator.fork("p", "c")
    before = allocator.backup()
    allocator.extend("c", 1)
    after = allocator.backup()
    if taken:
        assert allocator.take_copies() == [(0, 1)]
    allocator.restore(before)
    assert allocator.stats()["pending_copies"] == 0
    allocator.extend("p", 1)  # a copy of its own, which is made
    assert allocator.take_copies() == [(0, 1)]
    allocator.restore(after)
    assert allocator.pages("c") == [1]
    assert allocator.stats()["pending_copies"] == (0 if taken else 1)
    assert allocator.take_copies() == ([] if taken else [(0, 1)])
    assert allocator.take_copies() == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.extend("r", -1), "num_tokens: got -1"),
        (lambda a: a.extend("r", 100), "pages: request 'r' needs 25, but only"),
        (lambda a: a.free("x"), "request: got 'x'"),
        (lambda a: a.free("r", 3), "mask: got"),
        (lambda a: a.free("r", torch.zeros(2)), "mask: got Float"),
        (lambda a: a.free("r", [True] * 7), "mask: got 7 entries"),
        (lambda a: a.fork("r", "r"), "child: got 'r'"),
        (lambda a: a.restore(SlotAllocator(8, 4).backup()), "another allocator"),
        (lambda a: SlotAllocator(0, 4), "num_pages: got 0"),
    ],
)
def test_wrong_use_is_named_and_changes_nothing(call, message: str) -> None:
    allocator = SlotAllocator(8, 4)
    allocator.extend("r", 6)
    before = allocator.stats()
    with pytest.raises(NworError, match=message.replace("(", r"\(")):
        call(allocator)
    assert allocator.stats() == before
    assert allocator.slots("r").tolist() == [0, 1, 2, 3, 4, 5]


def test_slots_beyond_the_hosts_memory_change_nothing() -> None:
    allocator = SlotAllocator(4, 2**45)
    allocator.extend("parent", 1)
    allocator.fork("parent", "fork")
    before = allocator.stats()
    for request in ("new", "fork"):  # one that starts, and one whose page would be copied
        with pytest.raises(MemoryError):
            allocator.extend(request, 2**44)
    assert allocator.stats() == before
    assert "new" not in allocator
    assert allocator.pages("fork") == allocator.pages("parent")
