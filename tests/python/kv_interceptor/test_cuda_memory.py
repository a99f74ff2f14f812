"""A GPU without memory for staging: rounds are written directly, and later ones staged again.

The caching allocator is what refuses here, so names say "graph": those tests have it everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import nwor_specpv as nwor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LAYERS, PAGES, PAGE_SIZE, HEADS, DIM = 2, 8, 16, 2, 64
ROWS, FIRST = 5, 20  # of a round; its slots follow one another
PLAN = nwor.RoundPlan([ROWS], [ROWS - 1])
STAGING_ROWS = 1 << 17  # 64 MiB of keys and as much of values


@contextmanager
def no_memory() -> Iterator[None]:
    """The allocator takes nothing more from the GPU; small tensors fit into what it has."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


class Engine:
    """Caches of zeros, and an interceptor whose memory stays where it is, as vLLM has it."""

    def __init__(self) -> None:
        shape = (PAGES, HEADS, PAGE_SIZE, 2 * DIM)
        self.caches = [
            torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)
        ]
        self.interceptor = nwor.Interceptor(
            nwor.NworConfig(graph_rows=8, staging_rows=STAGING_ROWS)
        )
        for layer, cache in enumerate(self.caches):
            self.interceptor.bind_layer(str(layer), *nwor.cache_views(cache, "packed"))
        self.rows = torch.randn(2 * LAYERS, ROWS, HEADS, DIM, device="cuda").to(torch.bfloat16)
        self.slots = torch.arange(FIRST, FIRST + ROWS, device="cuda")
        self.path = torch.arange(1, ROWS, dtype=torch.int32, device="cuda")[None]
        # Tables and kernels of a round without drafts, so that the next one asks for staging alone.
        self.interceptor.begin(nwor.RoundPlan([ROWS], [0]))
        assert self.write() == ["direct"] * LAYERS
        self.interceptor.abort()
        for cache in self.caches:
            cache.zero_()

    def write(self) -> list[str]:
        return [
            self.interceptor.write(
                str(layer), self.rows[2 * layer], self.rows[2 * layer + 1], self.slots
            ).action
            for layer in range(LAYERS)
        ]

    def commit(self, count: int) -> Any:
        counts = torch.tensor([count], dtype=torch.int32, device="cuda")
        return self.interceptor.commit(self.path, counts)

    def expect(self, count: int) -> None:
        """The first rows are in their slots, and nothing else is anywhere."""
        for layer, cache in enumerate(self.caches):
            wanted = torch.zeros_like(cache)
            for view, rows in zip(
                nwor.cache_views(wanted, "packed"),
                self.rows[2 * layer : 2 * layer + 2],
                strict=True,
            ):
                slots = self.slots[:count]
                view[slots // PAGE_SIZE, slots % PAGE_SIZE] = rows[:count]
            assert torch.equal(cache, wanted)
            cache.zero_()


def test_rounds_outside_of_graphs_are_staged_once_there_is_memory() -> None:
    engine = Engine()
    with no_memory():
        decision = engine.interceptor.begin(PLAN)
        assert (decision.stage, decision.reason) == (False, "out_of_memory")
        assert engine.write() == ["direct"] * LAYERS
    receipt = engine.commit(2)
    assert receipt.ok
    assert receipt.committed_tokens == 0
    engine.expect(ROWS)
    assert engine.interceptor.stats()["staging_bytes"] == 0
    direct = 1
    while not engine.interceptor.begin(PLAN).stage:
        engine.interceptor.abort()
        direct += 1
        assert direct < 1000
    assert engine.interceptor.stats()["fallbacks"] == {"out_of_memory": direct}
    assert engine.write() == ["stage"] * LAYERS
    receipt = engine.commit(2)
    assert receipt.ok
    assert receipt.committed_tokens == 2
    engine.expect(3)


def test_a_graph_captured_without_memory_is_replayed_in_direct_rounds() -> None:
    """It stages nothing, so no round may be staged, although memory is back."""
    engine = Engine()
    with no_memory():
        assert engine.interceptor.begin(PLAN, capture=True).reason == "out_of_memory"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine.write()
    engine.interceptor.abort()
    for round_ in range(100):
        engine.rows += 1
        decision = engine.interceptor.begin(PLAN)
        assert (decision.stage, decision.reason) == (False, "out_of_memory")
        graph.replay()
        engine.interceptor.note_replay()
        receipt = engine.commit(2)
        if round_ % 25 == 0:
            assert receipt.ok
            engine.expect(ROWS)
    stats = engine.interceptor.stats()
    assert stats["fallbacks"] == {"out_of_memory": 100}
    assert (stats["staged_tokens"], stats["failed_tokens"]) == (0, 0)
