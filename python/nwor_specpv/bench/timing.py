"""Timing of alternating variants, on CUDA inside graphs, on the CPU by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median over replays, and the range of the middle 80 %."""

    median_us: float
    spread_us: float
    replays: int

    @staticmethod
    def of(samples_us: list[float]) -> Timing:
        ordered = sorted(samples_us)
        tenth = len(ordered) // 10
        middle = ordered[tenth : len(ordered) - tenth]
        return Timing(statistics.median(ordered), middle[-1] - middle[0], len(ordered))

    def __str__(self) -> str:
        return f"{self.median_us:.2f} [{self.spread_us:.2f}]"


def capture(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of everything `run` launches, after one run to warm up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def cold_l2() -> Callable[[], object]:
    """Reads a buffer of twice the device's L2: what lay there before is gone."""
    size = 2 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    buffer = torch.zeros(size // 4, dtype=torch.float32, device="cuda")
    return buffer.amax


def time_graphs(
    graphs: dict[str, torch.cuda.CUDAGraph],
    calls: dict[str, int],
    replays: int,
    before: Callable[[], object] | None = None,
    *,
    rehearse: bool = False,
) -> dict[str, Timing]:
    """Replays the graphs in turn; a graph's time is divided by its number of calls.

    A sleeping kernel holds the device back while the host enqueues, so that no launch gap of the
    host is measured. `before` is called ahead of every replay, outside of what is measured.
    `rehearse`: so is the graph itself, so that none finds another's code in the device's caches.
    """
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(replays + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if before is not None:
                before()
            if rehearse:
                graph.replay()
            torch.cuda._sleep(400_000)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if turn >= 2:  # the first turns upload graphs and warm caches
                samples[name].append(start.elapsed_time(end) * 1000 / calls[name])
    return {name: Timing.of(taken) for name, taken in samples.items()}


def time_calls(
    variants: dict[str, Callable[[], None]],
    replays: int,
    before: dict[str, Callable[[], None]] | None = None,
) -> dict[str, Timing]:
    """Calls the variants in turn on the CPU; what `before` has of a name runs ahead, unmeasured."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(replays + 2):
        for name, run in variants.items():
            if before is not None:
                before[name]()
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            if turn >= 2:
                samples[name].append(elapsed * 1e6)
    return {name: Timing.of(taken) for name, taken in samples.items()}
