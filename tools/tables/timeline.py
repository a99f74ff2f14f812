"""A verification step on a GPU, as benchmarks/vllm/timeline.py has recorded it."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import timeline_plot
from .records import RESULTS, head, load, row

FILE = "h200/timeline.json"
PLOT = "timeline.svg"


def plots(folder: Path) -> dict[Path, Callable[[], str]]:
    """The drawing, where there is a result."""
    if not (RESULTS / FILE).exists():
        return {}
    return {folder / PLOT: functools.partial(timeline_plot.render, load(FILE))}


def timeline_lines() -> Iterator[str]:
    if (RESULTS / FILE).exists():
        yield f"![A verification step: our ranges and the kernels]({PLOT})"
        yield ""
        yield from result_lines(load(FILE))
    else:
        yield "No timeline is recorded."


def result_lines(data: dict[str, Any]) -> Iterator[str]:
    """Our ranges: their time on the host and that of the kernels launched in them."""
    yield (
        f"{data['device']}, vLLM {data['vllm']}, torch {data['torch']}, commit `{data['commit']}`: "
        f"one step of {data['step_us'] / 1e3:.2f} ms on the host, {len(data['kernels'])} kernels, "
        "recorded by `benchmarks/vllm/timeline.py`; the profiler's own time is in it."
    )
    yield ""
    yield from head("range", "in the step", "us on the host, median", "kernels", "us on the GPU")
    for name in dict.fromkeys(name for name, _, _ in data["ranges"]):
        host = [us for own, _, us in data["ranges"] if own == name]
        device = [us for _, _, us, _, inside in data["kernels"] if inside == name]
        told = (f"{statistics.median(host):.1f}", len(device), f"{sum(device):.1f}")
        yield row(f"`{name}`", len(host), *told)
