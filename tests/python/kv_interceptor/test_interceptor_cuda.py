"""The interceptor over caches on a GPU: same flow, nothing waits, books kept on the device."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import nwor_specpv as nwor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LAYERS, PAGES, PAGE_SIZE, HEADS, DIM = 3, 8, 16, 2, 64
LATE = 1_000_000_000  # cycles: the device is half a second behind the host, also under a sanitizer


class Engine:
    """Caches, an interceptor over them and the rows of one step."""

    def __init__(
        self, config: nwor.NworConfig | None = None, dtype=torch.bfloat16, layers: int = LAYERS
    ) -> None:
        generator = torch.Generator("cuda").manual_seed(11)
        shape = (PAGES, HEADS, PAGE_SIZE, 2 * DIM)
        self.caches = [
            torch.randn(shape, generator=generator, device="cuda", dtype=dtype)
            for _ in range(layers)
        ]
        self.layers = layers
        self.before = [cache.clone() for cache in self.caches]
        self.interceptor = nwor.Interceptor(config or nwor.NworConfig())
        for layer, cache in enumerate(self.caches):
            self.interceptor.bind_layer(str(layer), *nwor.cache_views(cache, "packed"))
        self.generator = generator
        self.dtype = dtype

    def rows(self, count: int) -> torch.Tensor:
        shape = (count, HEADS, DIM)
        return torch.randn(shape, generator=self.generator, device="cuda", dtype=self.dtype)

    def write_all(self, slots: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        written = []
        slot_mapping = torch.tensor(slots, device="cuda")
        for layer in range(LAYERS):
            key, value = self.rows(len(slots)), self.rows(len(slots))
            outcome = self.interceptor.write(str(layer), key, value, slot_mapping)
            assert outcome.action == "stage"
            written.append((key, value))
        return written

    def commit(self, path: list[list[int]], counts: list[int], **kwargs):
        return self.interceptor.commit(
            torch.tensor(path, dtype=torch.int32, device="cuda"),
            torch.tensor(counts, dtype=torch.int32, device="cuda"),
            **kwargs,
        )

    def expect(self, written, destinations: dict[int, int]) -> None:
        """Slot -> row for everything that must have changed; all other bytes are as before."""
        for layer, (cache, before) in enumerate(zip(self.caches, self.before, strict=True)):
            wanted = before.clone()
            key, value = nwor.cache_views(wanted, "packed")
            for slot, row in destinations.items():
                key[slot // PAGE_SIZE, slot % PAGE_SIZE] = written[layer][0][row]
                value[slot // PAGE_SIZE, slot % PAGE_SIZE] = written[layer][1][row]
            assert torch.equal(cache.view(torch.int16), wanted.view(torch.int16))


def test_drafts_reach_the_cache_only_by_commit() -> None:
    engine = Engine()
    checker = nwor.ContractChecker(engine.interceptor)
    checker.snapshot()
    assert engine.interceptor.begin(nwor.RoundPlan([4, 1, 3], [3, 0, 2])).stage
    written = engine.write_all([20, 21, 22, 23, 60, 100, 101, 102])
    engine.expect(written, {20: 0, 60: 4, 100: 5})
    assert checker.verify_staged() == []
    receipt = engine.commit([[1, 2, -1], [-1, -1, -1], [6, 7, -1]], [2, 0, 2])
    assert receipt.ok
    assert receipt.committed_tokens == 4
    engine.expect(written, {20: 0, 21: 1, 22: 2, 60: 4, 100: 5, 101: 6, 102: 7})
    assert checker.verify(receipt, [2, 0, 2]) == []
    stats = engine.interceptor.stats()
    assert (stats["staged_tokens"], stats["committed_tokens"], stats["rejected_tokens"]) == (
        5,
        4,
        1,
    )
    per_token = LAYERS * 2 * HEADS * DIM * 2
    assert stats["cache_bytes_written"] == 7 * per_token
    assert stats["cache_bytes_avoided"] == per_token


def test_a_tree_path_goes_to_consecutive_slots_in_request_rows() -> None:
    engine = Engine()
    engine.interceptor.begin(nwor.RoundPlan([1, 5], [0, 4], [[], [0, 0, 1, 2]]))
    written = engine.write_all([7, 40, -1, -1, -1, -1])
    slots = torch.tensor([[-1, -1], [41, 42]], device="cuda")
    refused = engine.commit([[-1, -1], [2, 3]], [0, 2], slots=slots, rows="request", last=False)
    assert not refused.ok
    assert (refused.verdict.error, refused.verdict.request, refused.verdict.index) == (
        "not_a_chain",
        1,
        1,
    )
    engine.expect(written, {7: 0, 40: 1})
    assert engine.commit([[-1, -1], [2, 4]], [0, 2], slots=slots, rows="request").ok
    engine.expect(written, {7: 0, 40: 1, 41: 3, 42: 5})


def test_a_slot_mismatch_between_layers_refuses_the_commit() -> None:
    engine = Engine()
    engine.interceptor.begin(nwor.RoundPlan([3], [2]))
    same, other = torch.tensor([4, 5, 6], device="cuda"), torch.tensor([4, 5, 9], device="cuda")
    rows = [(engine.rows(3), engine.rows(3)) for _ in range(LAYERS)]
    for layer in range(LAYERS):
        slots = other if layer == 1 else same
        engine.interceptor.write(str(layer), *rows[layer], slots)
    receipt = engine.commit([[1, 2]], [2])
    assert not receipt.ok
    assert receipt.verdict.error == "slot_mismatch"
    engine.expect(rows, {4: 0})
    stats = engine.interceptor.stats()
    assert (stats["committed_tokens"], stats["rejected_tokens"]) == (0, 0)
    assert (stats["failed_tokens"], stats["cache_bytes_avoided"]) == (2, 0)
    assert stats["commit_failures"] == {"slot_mismatch": 1}
    assert nwor.Metrics().snapshot()["nwor_commit_failures_total"]["slot_mismatch"] >= 1


def test_a_slot_out_of_range_is_not_written_and_refuses_the_commit() -> None:
    engine = Engine()
    engine.interceptor.begin(nwor.RoundPlan([3], [1]))
    written = engine.write_all([PAGES * PAGE_SIZE, 5, 6])
    receipt = engine.commit([[2]], [1])
    assert receipt.verdict.error == "slot_range"
    engine.expect(written, {5: 1})


def test_rounds_with_and_without_a_fault_in_turn_over_many_thread_blocks() -> None:
    """A commit that ends a round clears its faults, which hundreds of thread blocks have read."""
    engine = Engine(nwor.NworConfig(graph_rows=64, staging_rows=64), layers=48)
    plan = nwor.RoundPlan([8] * 8, [7] * 8)
    path = [[8 * b + i for i in range(1, 8)] for b in range(8)]
    good = torch.arange(64, device="cuda")
    for turn in range(40):
        engine.interceptor.begin(plan)
        rows = [(engine.rows(64), engine.rows(64)) for _ in range(engine.layers)]
        engine.before = [cache.clone() for cache in engine.caches]
        for layer, (key, value) in enumerate(rows):
            slots = good + 1 if turn % 2 == 0 and layer == 7 else good
            engine.interceptor.write(str(layer), key, value, slots)
        receipt = engine.commit(path, [7] * 8)
        if turn % 2 == 0:
            assert receipt.verdict.error == "slot_mismatch"
            for cache, before in zip(engine.caches, engine.before, strict=True):
                changed = (cache != before).nonzero()[:, [0, 2]].unique(dim=0)
                slots = set((changed[:, 0] * PAGE_SIZE + changed[:, 1]).tolist())
                assert slots <= {slot for b in range(8) for slot in (8 * b, 8 * b + 1)}
        else:
            assert receipt.ok
            engine.expect(rows, {slot: slot for slot in range(64)})


def test_chunks_continue_where_the_last_one_ended() -> None:
    engine = Engine()
    engine.interceptor.begin(nwor.RoundPlan([5], [4]))
    written = engine.write_all([-1, 5, 6, 7, 8])
    assert engine.commit([[1, 2]], [2], last=False).ok
    assert engine.commit([[1, 2]], [2], last=False).verdict.error == "not_a_chain"
    assert engine.commit([[3, 4]], [2]).ok
    engine.expect(written, {5: 1, 6: 2, 7: 3, 8: 4})


def test_an_abort_after_a_chunk_settles_the_rest_as_rejected() -> None:
    engine = Engine()
    engine.interceptor.begin(nwor.RoundPlan([5], [4]))
    written = engine.write_all([-1, 5, 6, 7, 8])
    assert engine.commit([[1]], [1], last=False).ok
    engine.interceptor.abort()
    engine.expect(written, {5: 1})
    stats = engine.interceptor.stats()
    assert (stats["committed_tokens"], stats["rejected_tokens"]) == (1, 3)


def test_rounds_find_nothing_of_one_another() -> None:
    """With graph_rows a round like the last one sends no tables and clears nothing: the commit has.

    Slots, faults, tips of chunks and aborted rounds come before rounds that must not see them.
    """
    engine = Engine(nwor.NworConfig(graph_rows=16, staging_rows=16))
    plan, path = nwor.RoundPlan([5], [4]), [[1, 2, 3, 4]]

    def begin(first_slot: int, rounds: nwor.RoundPlan = plan):
        engine.before = [cache.clone() for cache in engine.caches]
        engine.interceptor.begin(rounds)
        count = sum(rounds.query_lens)
        return engine.write_all(list(range(first_slot, first_slot + count)))

    def accept(first_slot: int, count: int) -> None:
        written = begin(first_slot)
        assert engine.commit(path, [count]).ok
        engine.expect(written, {first_slot + row: row for row in range(count + 1)})

    accept(10, 2)
    accept(10, 4)
    accept(40, 4)  # other slots for the same staging rows
    engine.interceptor.begin(plan)
    slots = torch.arange(40, 45, device="cuda")
    for layer in range(LAYERS):
        engine.interceptor.write(str(layer), engine.rows(5), engine.rows(5), slots + layer)
    assert engine.commit(path, [1]).verdict.error == "slot_mismatch"
    accept(50, 3)
    begin(60)
    assert engine.commit([[1, 2]], [2], last=False).ok
    assert engine.commit([[3, 4]], [2]).ok
    accept(70, 1)
    begin(80)
    assert engine.commit([[1, 2]], [2], last=False).ok
    engine.interceptor.abort()
    accept(90, 4)
    begin(90)
    engine.interceptor.abort()
    accept(20, 0)
    written = begin(30, nwor.RoundPlan([3, 3], [2, 2]))
    assert engine.commit([[1, 2], [4, 5]], [1, 2]).ok
    engine.expect(written, {30: 0, 31: 1, 33: 3, 34: 4, 35: 5})
    accept(100, 4)


def test_rows_arrive_in_any_order() -> None:
    engine = Engine()
    engine.interceptor.begin(nwor.RoundPlan([4], [3]))
    rows = [(engine.rows(4), engine.rows(4)) for _ in range(LAYERS)]
    slots = torch.tensor([-1, 5, 6, 7], device="cuda")
    for order in ([3, 1], [2, 0]):
        index = torch.tensor(order, device="cuda")
        for layer in (2, 0, 1):
            key, value = rows[layer]
            engine.interceptor.write(str(layer), key[index], value[index], slots[index], rows=order)
    assert engine.commit([[1, 2, 3]], [3]).ok
    engine.expect(rows, {5: 1, 6: 2, 7: 3})


def test_metrics_count_what_the_device_committed() -> None:
    before = nwor.Metrics().snapshot()

    def rounds() -> tuple[weakref.ref, Any]:
        # In a frame of its own: what has looked at a frame's locals may keep what they were.
        engine = Engine()
        for accepted in (0, 1, 3):
            engine.interceptor.begin(nwor.RoundPlan([4], [3]))
            engine.write_all([20, 21, 22, 23])
            receipt = engine.commit([[1, 2, 3]], [accepted])
        return weakref.ref(engine.interceptor), receipt

    gone, receipt = rounds()  # waits for its commits; totals are folded in, not lost
    assert gone() is None
    after = nwor.Metrics().snapshot()
    assert receipt.committed_tokens == 3
    change = {
        name: after[name] - before[name]
        for name in (
            "nwor_staged_tokens_total",
            "nwor_committed_tokens_total",
            "nwor_rejected_tokens_total",
        )
    }
    assert list(change.values()) == [9, 4, 5]


def commit_once(accepted: int) -> None:
    """The first launch of a kernel takes the host long: tests of a late device come after it."""
    engine = Engine()
    engine.interceptor.begin(nwor.RoundPlan([4], [3]))
    engine.write_all([20, 21, 22, 23])
    assert engine.commit([[1, 2, 3]], [accepted]).ok


@pytest.mark.parametrize("stream", ["own", "other"])
def test_commits_of_a_late_device_are_not_lost(stream: str) -> None:
    """An interceptor goes before its last commit has begun, on this thread's stream or another."""
    names = ("nwor_committed_tokens_total", "nwor_rejected_tokens_total")
    commit_once(accepted=3)
    path = torch.tensor([[1, 2, 3]], dtype=torch.int32, device="cuda")
    counts = torch.tensor([2], dtype=torch.int32, device="cuda")
    before = nwor.Metrics().snapshot()
    done = torch.cuda.Event()

    def late_round() -> tuple[weakref.ref, Any]:
        engine = Engine()
        engine.interceptor.begin(nwor.RoundPlan([4], [3]))
        engine.write_all([20, 21, 22, 23])
        torch.cuda.synchronize()
        work = torch.cuda.current_stream() if stream == "own" else torch.cuda.Stream()
        with torch.cuda.stream(work):
            torch.cuda._sleep(LATE)
            receipt = engine.interceptor.commit(path, counts)
            done.record()
        assert not done.query(), "the device was not late"
        return weakref.ref(engine.interceptor), receipt

    gone, receipt = late_round()
    assert gone() is None
    assert done.query(), "the last totals were read before the last commit"
    after = nwor.Metrics().snapshot()
    assert [after[name] - before[name] for name in names] == [2, 1]
    assert receipt.committed_tokens == 2


def test_totals_wait_for_this_threads_commits_and_metrics_for_none() -> None:
    name = "nwor_committed_tokens_total"
    commit_once(accepted=1)
    path = torch.tensor([[1, 2, 3]], dtype=torch.int32, device="cuda")
    counts = torch.tensor([3], dtype=torch.int32, device="cuda")
    engine = Engine()
    engine.interceptor.begin(nwor.RoundPlan([4], [3]))
    engine.write_all([20, 21, 22, 23])
    before = nwor.Metrics().snapshot()[name]
    torch.cuda._sleep(LATE)
    engine.interceptor.commit(path, counts)
    assert nwor.Metrics().snapshot()[name] == before
    assert engine.interceptor.stats()["committed_tokens"] == 3
    assert nwor.Metrics().snapshot()[name] == before + 3


def test_nothing_waits_for_the_device() -> None:
    engine = Engine()
    engine.interceptor.begin(nwor.RoundPlan([4], [3]))  # allocates
    engine.interceptor.abort()
    path = torch.tensor([[1, 2, 3]], dtype=torch.int32, device="cuda")
    counts = torch.tensor([2], dtype=torch.int32, device="cuda")
    slots = torch.tensor([20, 21, 22, 23], device="cuda")
    rows = [(engine.rows(4), engine.rows(4)) for _ in range(LAYERS)]
    engine.interceptor.begin(nwor.RoundPlan([4], [3]))
    for layer in range(LAYERS):
        engine.interceptor.write(str(layer), *rows[layer], slots)
    engine.interceptor.commit(path, counts)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # a host sync now raises
    try:
        engine.interceptor.begin(nwor.RoundPlan([4], [3]))
        for layer in range(LAYERS):
            engine.interceptor.write(str(layer), *rows[layer], slots)
        receipt = engine.interceptor.commit(path, counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert receipt.ok
