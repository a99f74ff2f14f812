"""Servers under traffic, as benchmarks/vllm/serving.py has measured them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from . import serving_plot
from .records import RESULTS, head, row

PEERS = ("stock", "plain")


def results() -> dict[str, dict[str, Any]]:
    """Every recorded result by the name of its file."""
    files = sorted(RESULTS.glob("h200/serving_*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def serving_lines() -> Iterator[str]:
    """Every result, and its plot, which lies beside the page."""
    found = results()
    if not found:
        yield "No run of `benchmarks/vllm/serving.py` is recorded."
    for number, (name, data) in enumerate(found.items()):
        if number:
            yield ""
        yield from result_lines(data)
        yield ""
        yield f"![{serving_plot.title_of(data)}](vllm_{name}.svg)"


def result_lines(data: dict[str, Any]) -> Iterator[str]:
    """What was measured, a row for each load and side, and what is missing."""
    peers = [one for one in PEERS if any(one in load["sides"] for load in data["loads"])]
    yield (
        f"**{data['model']}** ({data['dtype']}), {_drafter(data)}, {data['device']}, vLLM "
        f"{data['vllm']}, commit `{data['commit']}`. {data['requests_of_a_load']} requests of the "
        f"lengths `{data['lengths']}` for each load, {_sampling(data)}, the same for all sides; "
        "medians of the turns. `8c`: clients that wait for their answer; a number or share: "
        "requests a second at random moments, shares are of what "
        f"{(peers or PEERS)[0]} vLLM served when all came at once (`all`)."
    )
    yield ""
    yield from head(
        "load", "requests/s", "side", "tokens/s", *(f"to {peer}" for peer in peers),
        "first token ms p50 / p99", "ms per token p50 / p99", "KV cache mean / most",
        "accepted drafts", "preemptions",
    )  # fmt: skip
    for load in data["loads"]:
        for side in serving_plot.SIDES:
            if side in load["sides"]:
                yield row(*_cells(load, side, peers))
    missing = [
        f"* Not measured: {side} at {load['load']}: {reason}."
        for load in data["loads"]
        for side, reason in load["missing"].items()
    ]
    if missing:
        yield ""
        yield from missing


def _drafter(data: dict[str, Any]) -> str:
    told = [drafter for drafter in data["drafter"].values() if drafter]
    if any("synthetic_acceptance_rates" in drafter for drafter in told):
        rates = next(drafter["synthetic_acceptance_rates"] for drafter in told)
        shares = ", ".join(f"{100 * rate:.0f} %" for rate in rates)
        return f"dummy weights, a head of which the first drafts are accepted in {shares} of steps"
    return "the same head on all sides that draft" if data["head"] else "drafter n-grams"


def _sampling(data: dict[str, Any]) -> str:
    return f"temperature {data['temperature']:g}" if data["temperature"] else "greedy"


def _cells(load: dict[str, Any], side: str, peers: Sequence[str]) -> Iterator[str]:
    told = load["sides"][side]
    offered = load["offered_per_s"]
    yield f"{load['load']}".replace("%", " %")
    yield f"{offered:.3g}" if offered else f"{told['requests_per_s']:.3g} served"
    yield side
    yield f"{told['tokens_per_s']:.0f}"
    for peer in peers:
        ratio = told.get(f"to_{peer}", {}).get("tokens_per_s")
        yield f"{ratio:.3f}" if ratio else "-"
    yield f"{told['first_ms']['p50']:.0f} / {told['first_ms']['p99']:.0f}"
    yield f"{told['token_ms']['p50']:.2f} / {told['token_ms']['p99']:.2f}"
    yield f"{told['cache_use']['mean']:.0%} / {told['cache_use']['most']:.0%}".replace("%", " %")
    share = told["acceptance"]
    yield "-" if share is None else f"{share:.0%}".replace("%", " %")
    yield f"{told['preemptions']:.0f}"
