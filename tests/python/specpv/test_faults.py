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

from nwor_specpv import (
    CommitTail,
    Metrics,
    NworError,
    PartialStore,
    SpecPVConfig,
    StepDecision,
)
from tests.python.specpv.contexts import seeded
from tests.python.specpv.test_decoding import configured, prompts
from tests.python.specpv.toy_model import (
    DIM,
    HEADS,
    LAYERS,
    VOCAB,
    Host,
    Request,
    Weights,
    decode_plainly,
)

NEW = 24


def counted(trigger: str) -> int:
    return Metrics().snapshot()["specpv_full_steps_total"].get(trigger, 0)


def lossless(rng: random.Random, **values: object) -> SpecPVConfig:
    fixed = {"specpv_mode": "lossless", "specpv_selector": "specpv"}
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


def started(rng: random.Random, count: int = 2, **values: object) -> Host:
    """Requests with a view: the next step is partial."""
    config = lossless(rng, specpv_n_retrieval_blocks=2, **values)
    host = Host(Weights(rng.randrange(1 << 30)), config, count, max_tokens=160)
    for prompt in prompts(rng, count):
        host.add(prompt, NEW)
    host.step([[] for _ in range(count)])
    return host


def table_of(host: Host) -> torch.Tensor:
    return torch.tensor([r.pages for r in host.requests], dtype=torch.int32)


@pytest.mark.parametrize("storage", ["paged", "compact"])
def test_a_request_that_may_outgrow_the_store_has_the_budget_of_the_longest(storage: str) -> None:
    rng = seeded()
    config = lossless(
        rng,
        specpv_storage=storage,
        specpv_budget="adaptive",
        specpv_block_size=4,
        specpv_n_retrieval_blocks=64,
    )
    host = Host(Weights(rng.randrange(1 << 30)), config, 2, max_tokens=160)
    assert host.store.budget.retrieval_blocks == 5
    for wrong, message in (((200, -1), "max_new_tokens: got -1"), ((-1, 9), "prompt_tokens: got")):
        with pytest.raises(NworError, match=message):
            host.store.open(*wrong)
    for prompt, new_tokens in zip(prompts(rng, 2), (10_000, 2**63 - 1), strict=True):
        request = host.add(prompt, new_tokens)
        assert request.cache.budget.retrieval_blocks == 5

    def check(host: Host, request: Request) -> None:
        if request.decision.kind == "partial":
            place = host.requests.index(request)
            assert int(host.store.view_lens[place]) == request.decision.view_tokens

    host.after_step = check
    plain = [decode_plainly(host.w, r.tokens, NEW) for r in host.requests]
    assert host.decode(NEW, rng) == plain
    assert host.kinds["partial"] > 0
    assert "offload_failure" not in host.triggers


def test_compact_views_are_as_long_as_the_device_says() -> None:
    """A list that is shorter than the host believes, and a view that does not fit."""
    rng = seeded()
    host = started(rng, specpv_storage="compact")
    first = host.requests[0]
    host.store.ids[:, first.cache.row, :, 1:] = -1
    batch = [(r.cache, host.policy.decide(r.cache, 1)) for r in host.requests]
    assert [decision.kind for _, decision in batch] == ["partial"] * 2
    host.store.begin(batch)
    host.store.build_views(table_of(host))
    host.compact.update(batch)
    lens = host.compact.view(0).lens
    size = host.config.specpv_block_size
    told = [decision.view_tokens for _, decision in batch]
    assert lens.tolist() == host.store.view_lens.tolist() == [told[0] - size, told[1]]
    assert host.compact._held.tolist() == lens.tolist()
    host.store.build_views(table_of(host)[:, :2].contiguous())
    host.compact.update(batch)
    assert host.store.num_blocks.tolist() == host.compact.view(0).lens.tolist() == [-1, -1]
    assert [r.cache.required for r in host.requests] == ["none"] * 2


def test_a_batch_has_requests_of_its_store_once_each() -> None:
    rng = seeded()
    host, stranger = started(rng), started(rng, count=1)
    ids, lens = host.store.ids.clone(), host.store.committed_lens.clone()
    own, other = host.requests[0].cache, stranger.requests[0].cache
    decision = host.policy.decide(own, 1)
    for batch, message in (
        (
            [None, (other, host.policy.decide(other, 1))],
            r"batch\[1\]: got a cache of another store",
        ),
        ([(own, decision), (own, decision)], r"batch\[1\]: got the cache of batch\[0\] again"),
    ):
        with pytest.raises(NworError, match=message):
            host.store.begin(batch)
        assert torch.equal(host.store.committed_lens, lens)
    assert torch.equal(host.store.ids, ids)


@pytest.mark.parametrize("selector", ["specpv", "streaming"])
def test_a_refresh_that_never_ran_is_not_believed(selector: str) -> None:
    rng = seeded()
    host = started(rng, specpv_selector=selector)
    first, second = (r.cache for r in host.requests)

    def decided(cache: object) -> StepDecision:
        cache.require_full()
        decision = host.policy.decide(cache, 1)
        assert decision.kind == "full_refresh"
        return decision

    def check(cache: object, decision: StepDecision) -> None:
        cache.finish(decision, 0)
        assert (cache.selected, cache.required) == (False, "refresh_failure")
        assert host.policy.decide(cache, 1).trigger == "refresh_failure"

    def refresh(*caches: object) -> None:
        batch = [(cache, decided(cache)) if cache in caches else None for cache in (first, second)]
        host.store.begin(batch)
        for layer in range(LAYERS):
            host.store.refresh_layer(layer, torch.randn(2, 1, HEADS, DIM), table_of(host))
        for cache, decision in filter(None, batch):
            cache.finish(decision, 0)
            assert (cache.selected, cache.required) == (True, "none")

    check(first, decided(first))  # the store begun and refreshed in the step before, not in this
    refresh(first, second)
    refresh(second)  # and without it
    check(first, decided(first))
    refresh(first, second)
    refused = decided(first)
    with pytest.raises(NworError, match="batch: got 3 requests"):
        host.store.begin([(first, refused), None, None])
    check(first, refused)
    fresh = Host(host.w, host.config, 1, max_tokens=160)  # nothing was begun at all
    request = fresh.add(prompts(rng, 1)[0], NEW)
    check(request.cache, fresh.policy.decide(request.cache, 1))


def test_a_new_request_has_no_blocks_of_the_one_before() -> None:
    rng = seeded()
    host = started(rng, count=1)
    row = host.requests[0].cache.row
    assert (host.store.ids[:, row] >= 0).all()
    host.free += host.requests.pop().pages
    gc.collect()
    request = host.add(prompts(rng, 1)[0], NEW)
    assert request.cache.row == row
    host.store.begin([(request.cache, host.policy.decide(request.cache, 1))])
    assert (host.store.ids[:, row] == -1).all()


@pytest.mark.parametrize("selector", ["specpv", "streaming"])
def test_a_batch_may_be_begun_before_another_is_finished(selector: str) -> None:
    rng = seeded()
    host = started(rng, specpv_selector=selector)
    caches = [request.cache for request in host.requests]
    decisions = []
    for cache in caches:
        cache.require_full()
        decisions.append(host.policy.decide(cache, 1))
        host.store.begin([(cache, decisions[-1])])
        for layer in range(LAYERS):
            host.store.refresh_layer(layer, torch.randn(2, 1, HEADS, DIM), table_of(host))
    for cache, decision in zip(caches, decisions, strict=True):
        cache.finish(decision, 0)
        assert (cache.selected, cache.required) == (True, "none")


def test_requests_are_opened_outside_of_the_mode_that_steps_run_in() -> None:
    """A scheduler's thread need not be in inference mode, which is each thread's own."""
    with torch.inference_mode():
        host = started(seeded())
    host.free += host.requests.pop().pages
    gc.collect()
    opened = host.store.open(10)
    assert opened is not None
    with torch.inference_mode():
        host.store.begin([None, (opened, host.policy.decide(opened, 1))])


def test_contexts_that_no_device_counts_are_refused() -> None:
    cache = torch.zeros(1, 8, 1, 4)
    config = SpecPVConfig(enable_specpv=True, specpv_block_size=8, specpv_selector="sliding")
    sizes = {"max_requests": 1, "max_rows": 1}
    most = 2**31 - 1024
    PartialStore(config, [cache], [cache], max_tokens=most, **sizes)
    with pytest.raises(NworError, match=f"max_tokens: got {most + 1}, expected at most {most}"):
        PartialStore(config, [cache], [cache], max_tokens=most + 1, **sizes)


def test_a_failed_copy_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    host = started(seeded(), specpv_storage="compact")
    texts = iter(["the bus is gone", "the bus is gone", "no memory: got 3"])

    def failing() -> None:
        raise RuntimeError(next(texts))

    host.compact._gather = failing
    with caplog.at_level("WARNING", logger="nwor_specpv"):
        for _ in range(3):
            host.step([[], []])
            assert [r.cache.required for r in host.requests] == ["offload_failure"] * 2
            gather, host.compact._gather = host.compact._gather, lambda: None
            host.step([[], []])
            host.compact._gather = gather
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2
    assert "the bus is gone" in logged[0]
    assert "no memory: got 3" in logged[1]


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
