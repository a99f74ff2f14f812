"""Faults in the middle of a generation: the answer stays right, and each is counted by its reason.

All in lossless mode, where right means plain decoding token for token.
"""

from __future__ import annotations

import gc
import math
import random
import weakref

import pytest
import torch

from nwor_specpv import CommitTail, Metrics, NworError, SpecPVConfig
from specpv.contexts import seeded
from specpv.test_decoding import configured, prompts
from specpv.toy_model import VOCAB, Host, Weights, decode_plainly

NEW = 24


def counted(trigger: str) -> int:
    return Metrics().snapshot()["specpv_full_steps_total"].get(trigger, 0)


def lossless(rng: random.Random, **values: object) -> SpecPVConfig:
    fixed = {"specpv_rectify": "lossless", "specpv_selector": "specpv"}
    return configured(rng, **(fixed | values))


class FaultyRefresh(Host):
    """Now and then a layer's refresh is given something that it refuses."""

    def __init__(self, rng: random.Random, *arguments: object) -> None:
        super().__init__(*arguments)
        self.rng, self.failures = rng, 0

    def refresh(self, layer: int, *given: torch.Tensor) -> None:
        query, *others = given
        refreshes = any(r.decision.kind == "full_refresh" for r in self.requests)
        if not refreshes or self.rng.random() < 0.7:
            return super().refresh(layer, *given)
        self.failures += 1
        with pytest.raises(NworError, match="query: got"):
            super().refresh(layer, query[..., :3, :], *others)
        return None


def run(host: Host, rng: random.Random, count: int = 2) -> None:
    for prompt in prompts(rng, count):
        host.add(prompt, NEW)
    plain = [decode_plainly(host.w, r.tokens, NEW) for r in host.requests]
    assert host.decode(NEW, rng) == plain


def test_refreshes_that_fail() -> None:
    rng = seeded()
    before, failures, seen = counted("refresh_failure"), 0, 0
    while failures < 3:
        host = FaultyRefresh(rng, Weights(rng.randrange(1 << 30)), lossless(rng), 2, 160)
        run(host, rng)
        failures += host.failures
        seen += host.triggers.get("refresh_failure", 0)
    assert counted("refresh_failure") - before == seen > 0


def test_copies_that_fail() -> None:
    rng = seeded()
    before = counted("offload_failure")
    config = lossless(rng, specpv_storage="compact", specpv_offload=True)
    host = Host(Weights(rng.randrange(1 << 30)), config, 2, max_tokens=160)
    gather, failures = host.compact._gather, 0

    def unreliable() -> None:
        nonlocal failures
        partial = any(r.decision.kind == "partial" for r in host.requests)
        if partial and (failures == 0 or rng.random() < 0.3):
            failures += 1
            raise RuntimeError("injected: the bus is gone")
        gather()

    host.compact._gather = unreliable
    run(host, rng)
    assert failures > 0
    assert host.kinds["partial"] > 0
    assert counted("offload_failure") - before == host.triggers["offload_failure"] > 0


def test_a_tail_that_overflows() -> None:
    """A compact view without room refuses the commit of all layers; the step is made again."""
    rng = seeded()
    before = counted("tail_overflow")
    config = lossless(rng, specpv_storage="compact", specpv_n_spec_tokens_buf=9)
    host = Host(Weights(rng.randrange(1 << 30)), config, 2, max_tokens=160)
    host.may_refuse = True
    whole = host.compact.tail

    def short_of_room(root_slots: torch.Tensor) -> CommitTail:
        tail = whole(root_slots)
        longest = int(tail.tail_begin.max())
        if longest < 0 or (host.refusals and rng.random() < 0.7):
            return tail
        return CommitTail(
            tail.tail_keys[:, :, :, :longest],
            tail.tail_values[:, :, :, :longest],
            tail.tail_begin,
            tail.root_slots,
            tail.tail_held,
        )

    host.compact.tail = short_of_room
    run(host, rng)
    assert host.refusals > 0
    assert counted("tail_overflow") - before == host.triggers["tail_overflow"] > 0


def test_a_tail_without_room_for_the_next_tree() -> None:
    rng = seeded()
    before = counted("tail_full")
    host = Host(Weights(rng.randrange(1 << 30)), lossless(rng), 2, max_tokens=160)
    room = host.store.budget.tail_capacity

    def check(host: Host, request: object) -> None:
        assert request.cache.tail_len <= room

    host.after_step = check
    run(host, rng)
    assert counted("tail_full") - before == host.triggers["tail_full"] > 0


@pytest.mark.parametrize("storage", ["paged", "compact"])
def test_a_request_aborted_between_steps_leaves_nothing(storage: str) -> None:
    rng = seeded()
    config = lossless(rng, specpv_storage=storage)
    host = Host(Weights(rng.randrange(1 << 30)), config, 3, max_tokens=160)
    bytes_before = host.store.bytes
    for prompt in prompts(rng, 3):
        host.add(prompt, NEW)
    truth = {id(r): decode_plainly(host.w, r.tokens, NEW + 12) for r in host.requests}
    while host.requests[1].cache.tail_len == 0:
        host.step([[] for _ in host.requests])
    gone = host.requests.pop(1)
    cache, row = weakref.ref(gone.cache), gone.cache.row
    host.free += gone.pages
    del gone
    gc.collect()
    assert cache() is None
    assert host.store.free_rows == 1
    # The row is the next one's, and nothing of the first shows: neither blocks nor summaries.
    request = host.add(prompts(rng, 1)[0], NEW)
    assert (request.cache.row, request.cache.selected) == (row, False)
    assert request.cache.summarized_blocks == 0
    truth[id(request)] = decode_plainly(host.w, request.tokens, NEW + 12)
    shown = host.decode(NEW, rng)
    assert shown == [truth[id(r)][:NEW] for r in host.requests]
    assert host.store.bytes == bytes_before
    del request
    host.requests.clear()
    gc.collect()
    assert host.store.free_rows == 3


def test_a_context_within_the_view_runs_full() -> None:
    rng = seeded()
    before = counted("short_context")
    config = lossless(rng, specpv_n_retrieval_blocks=18, specpv_block_size=8)
    host = Host(Weights(rng.randrange(1 << 30)), config, 2, max_tokens=161)
    run(host, rng)
    assert set(host.kinds) == {"full"}
    assert counted("short_context") - before == host.triggers["short_context"]


def test_each_request_has_its_own_budget() -> None:
    """Adaptive: an eighth of the blocks of prompt and new tokens, at least the window's."""
    rng = seeded()
    config = lossless(
        rng,
        specpv_budget="adaptive",
        specpv_block_size=4,
        specpv_n_retrieval_blocks=9,
        specpv_n_window_blocks=1,
    )
    host = Host(Weights(rng.randrange(1 << 30)), config, 3, max_tokens=320)
    budgets = []
    for length, new in ((40, NEW), (100, NEW), (100, 200)):
        request = host.add([rng.randrange(VOCAB) for _ in range(length)], new)
        blocks = math.ceil((length + new) / 4)
        expected = min(9, math.ceil(blocks / 8))
        assert request.cache.budget.retrieval_blocks == expected
        budgets.append(expected)
    assert sorted(set(budgets)) == budgets  # three different ones
    host.step([[], [], []])
    for request, budget in zip(host.requests, budgets, strict=True):
        for ids in host.store.ids[:, request.cache.row].flatten(0, 1).tolist():
            assert sum(i >= 0 for i in ids) == budget
    host.step([[], [], []])
    assert [r.decision.kind for r in host.requests] == ["partial"] * 3
    lens = host.store.view_lens.tolist()
    assert lens == [r.decision.view_tokens for r in host.requests]
