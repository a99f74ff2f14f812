"""Servers under traffic, as benchmarks/vllm/serving.py has measured them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .records import RESULTS, head, row

SIDES = ("stock", "nwor", "long")


def results() -> dict[str, dict[str, Any]]:
    """Every recorded result by the name of its file."""
    files = sorted(RESULTS.glob("h200/serving_*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def serving_lines() -> Iterator[str]:
    for number, data in enumerate(results().values()):
        if number:
            yield ""
        yield from result_lines(data)


def result_lines(data: dict[str, Any]) -> Iterator[str]:
    """What was measured, a row for each load and side, and what is missing."""
    drafter = data["head"] or "n-grams"
    yield (
        f"**{data['model']}** ({data['dtype']}), drafter {drafter}, {data['device']}, vLLM "
        f"{data['vllm']}, commit `{data['commit']}`. {data['requests_of_a_load']} requests of the "
        f"lengths `{data['lengths']}` for each load, the same for all sides; medians of the turns. "
        "`8c`: clients that wait for their answer; a number or share: requests a second at random "
        "moments, shares are of what stock vLLM served when all came at once (`all`)."
    )
    yield ""
    yield from head(
        "load", "requests/s", "side", "tokens/s", "to stock", "first token ms p50 / p99",
        "ms per token p50 / p99", "KV cache mean / most", "accepted drafts", "preemptions",
    )  # fmt: skip
    for load in data["loads"]:
        for side in SIDES:
            if side in load["sides"]:
                yield row(*_cells(load, side))
    missing = [
        f"* Not measured: {side} at {load['load']}: {reason}."
        for load in data["loads"]
        for side, reason in load["missing"].items()
    ]
    if missing:
        yield ""
        yield from missing


def _cells(load: dict[str, Any], side: str) -> Iterator[str]:
    told = load["sides"][side]
    offered = load["offered_per_s"]
    yield f"{load['load']}".replace("%", " %")
    yield f"{offered:.3g}" if offered else f"{told['requests_per_s']:.3g} served"
    yield side
    yield f"{told['tokens_per_s']:.0f}"
    ratio = told.get("to_stock", {}).get("tokens_per_s")
    yield f"{ratio:.3f}" if ratio else "-"
    yield f"{told['first_ms']['p50']:.0f} / {told['first_ms']['p99']:.0f}"
    yield f"{told['token_ms']['p50']:.2f} / {told['token_ms']['p99']:.2f}"
    yield f"{told['cache_use']['mean']:.0%} / {told['cache_use']['most']:.0%}".replace("%", " %")
    share = told["acceptance"]
    yield "-" if share is None else f"{share:.0%}".replace("%", " %")
    yield f"{told['preemptions']:.0f}"
