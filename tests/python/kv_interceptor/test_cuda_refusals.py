"""A commit on CUDA that is refused leaves every byte as it was, and says why."""

from __future__ import annotations

import pytest
import torch

from nwor_specpv import COMMIT_ERRORS
from tests.python.kv_interceptor.cuda_caches import (
    CHAIN_ROWS,
    DEVICE,
    Caches,
    apply,
    check_ok,
    commit,
    generator_of,
    make_batch,
    make_status,
    staged_rows,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def break_count_negative(batch):
    batch.counts[1] = -1
    return "count_range", 1, 0, -1


def break_count_beyond_depth(batch):
    batch.counts[2] = 5
    return "count_range", 2, 0, 5


def break_path_negative(batch):
    batch.path[1, 2] = -1
    return "path_range", 1, 2, -1


def break_path_beyond_staging(batch):
    batch.path[3, 3] = 4 * CHAIN_ROWS
    return "path_range", 3, 3, 4 * CHAIN_ROWS


def break_path_huge(batch):
    batch.path[0, 0] = 2**31 - 1
    return "path_range", 0, 0, 2**31 - 1


def break_order(batch):
    batch.path[2, 1], batch.path[2, 2] = batch.path[2, 2].item(), batch.path[2, 1].item()
    return "not_a_chain", 2, 2, batch.path[2, 2].item()


def break_slot_negative(batch):
    batch.slots[0, 3] = -1
    return "slot_range", 0, 3, -1


def break_slot_far_negative(batch):
    batch.slots[0, 1] = -(2**62)
    return "slot_range", 0, 1, -(2**62)


def break_slot_beyond(batch):
    batch.slots[3, 0] = 8 * 16
    return "slot_range", 3, 0, 8 * 16


def break_slot_far_beyond(batch):
    batch.slots[3, 0] = 2**40
    return "slot_range", 3, 0, 2**40


def break_duplicate_within(batch):
    batch.slots[1, 3] = batch.slots[1, 0]
    return "duplicate_slot", 1, 3, batch.slots[1, 0].item()


def break_duplicate_across(batch):
    batch.slots[3, 1] = batch.slots[0, 2]
    return "duplicate_slot", 3, 1, batch.slots[0, 2].item()


def break_many_the_first_counts(batch):
    batch.slots[3, 3] = batch.slots[3, 2] = batch.slots[2, 1] = batch.slots[0, 3]
    batch.counts[3] = 9
    batch.path[2, 3] = 2**20
    return "duplicate_slot", 2, 1, batch.slots[0, 3].item()


def break_entry_in_two_ways(batch):
    batch.path[1, 1], batch.slots[1, 1] = -5, 2**50
    return "path_range", 1, 1, -5


BREAKS = [value for name, value in sorted(globals().items()) if name.startswith("break_")]


@pytest.mark.parametrize("layout", ["kv_first", "packed"])
@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
def test_commit_leaves_every_byte_unchanged_when(break_it, layout):
    generator = generator_of(7)
    caches = Caches(3, 8, 16, 3, 64, torch.bfloat16, layout, generator)
    staged = staged_rows(3, 4 * CHAIN_ROWS, 3, 64, torch.bfloat16, generator)
    on_device = [t.to(DEVICE) for t in staged]
    batch = make_batch(4, 4, caches.num_slots, generator, full=True)
    label, request, index, value = break_it(batch)
    for _ in range(5):  # the report does not depend on which block or thread comes first
        status = make_status()
        commit(on_device, caches, batch, status)
        assert status.tolist() == [COMMIT_ERRORS.index(label), request, index, value, 0, 0, 0, 0]
    caches.check()
    for before, after in zip(staged, on_device, strict=True):
        assert torch.equal(before.view(torch.uint8), after.cpu().view(torch.uint8))


def test_commit_refuses_a_path_that_leaves_its_parents():
    generator = generator_of(8)
    caches = Caches(2, 8, 16, 2, 64, torch.bfloat16, "kv_first", generator)
    batch = make_batch(3, 4, caches.num_slots, generator, full=True)
    batch.parents = torch.full((3 * CHAIN_ROWS,), -1, dtype=torch.int32)
    for b in range(3):
        for i in range(1, CHAIN_ROWS):
            batch.parents[b * CHAIN_ROWS + i] = b * CHAIN_ROWS + i - 1
    staged = staged_rows(2, 3 * CHAIN_ROWS, 2, 64, torch.bfloat16, generator)
    on_device = [t.to(DEVICE) for t in staged]
    for request, index, row in ((0, 0, 1), (1, 2, CHAIN_ROWS + 4), (2, 3, 2)):
        broken = batch.copy()
        broken.path[request, index] = row
        status = make_status()
        commit(on_device, caches, broken, status)
        code = COMMIT_ERRORS.index("not_a_chain")
        assert status.tolist() == [code, request, index, row, 0, 0, 0, 0]
        caches.check()
    status = make_status()
    commit(on_device, caches, batch, status)
    check_ok(status, apply(caches, staged, batch))
    caches.check()


def test_commit_finds_duplicates_in_a_full_batch():
    generator = generator_of(9)
    caches = Caches(1, 600, 16, 1, 64, torch.bfloat16, "kv_first", generator)
    staged = staged_rows(1, 1024 * 11, 1, 64, torch.bfloat16, generator)
    on_device = [t.to(DEVICE) for t in staged]
    clean = make_batch(1024, 8, caches.num_slots, generator, full=True)
    for first, later in (((0, 0), (1023, 7)), ((511, 3), (511, 4)), ((1000, 0), (1001, 0))):
        batch = clean.copy()
        batch.slots[later] = batch.slots[first]
        status = make_status()
        commit(on_device, caches, batch, status)
        code = COMMIT_ERRORS.index("duplicate_slot")
        assert status.tolist() == [code, *later, batch.slots[first].item(), 0, 0, 0, 0]
        caches.check()
    batch = clean.copy()
    batch.slots[:] = 5  # everybody wants one slot: the second of all is reported
    status = make_status()
    commit(on_device, caches, batch, status)
    assert status.tolist()[:4] == [COMMIT_ERRORS.index("duplicate_slot"), 0, 1, 5]
    caches.check()


@pytest.mark.parametrize(("requests", "depth"), [(1, 2), (4, 8), (11, 3), (8, 8), (64, 1)])
def test_commit_finds_every_pair_in_a_small_batch(requests, depth):
    """Up to 64 entries are compared by one warp: each with each, and only accepted ones."""
    generator = generator_of(10)
    caches = Caches(1, 16, 16, 1, 64, torch.bfloat16, "kv_first", generator)
    staged = staged_rows(1, requests * (depth + 3), 1, 64, torch.bfloat16, generator)
    on_device = [t.to(DEVICE) for t in staged]
    clean = make_batch(requests, depth, caches.num_slots, generator, full=True)
    slots, held, entries = clean.slots.flatten(), clean.to(DEVICE), requests * depth
    pairs = [(first, later) for later in range(entries) for first in range(later)]
    states = torch.full((len(pairs), 8), -77, dtype=torch.int64, device=DEVICE)
    for (first, later), status in zip(pairs, states, strict=True):
        held.slots.view(-1)[later] = held.slots.view(-1)[first]
        commit(on_device, caches, held, status)
        held.slots.view(-1)[later] = slots[later].item()
    code = COMMIT_ERRORS.index("duplicate_slot")
    expected = [
        [code, *divmod(later, depth), slots[first].item(), 0, 0, 0, 0] for first, later in pairs
    ]
    assert states.tolist() == expected

    # The same lower word is not the same slot.
    status, far = make_status(), clean.copy()
    far.slots.view(-1)[-1] = slots[0] + 2**32
    commit(on_device, caches, far, status)
    code = COMMIT_ERRORS.index("slot_range")
    where = divmod(entries - 1, depth)
    assert status.tolist() == [code, *where, slots[0].item() + 2**32, 0, 0, 0, 0]
    caches.check()

    # What was not accepted has no slot.
    some = clean.copy()
    some.counts[-1] -= 1
    some.slots.view(-1)[-1] = slots[0]
    status = make_status()
    commit(on_device, caches, some, status)
    check_ok(status, apply(caches, staged, some))
    caches.check()
