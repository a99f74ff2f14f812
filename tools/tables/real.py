"""Long contexts with real weights and real text, as benchmarks/vllm/real.py has measured them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .records import RESULTS, head, row
from .vllm import geometric_mean

SIDES = ("plain", "ngram", "eagle3", "idle", "streaming", "lossless")
OURS = "lossless"


def results() -> dict[str, dict[str, Any]]:
    """Every recorded result by the name of its file."""
    files = sorted(RESULTS.glob("h200/real_*.json"))
    return {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in files}


def real_lines() -> Iterator[str]:
    for number, data in enumerate(results().values()):
        if number:
            yield ""
        yield from result_lines(data)


def sides_of(data: dict[str, Any]) -> list[str]:
    return [side for side in SIDES if any(side in cell["sides"] for cell in data["cells"])]


def speeds(data: dict[str, Any], side: str) -> list[float]:
    """Tokens per second relative to plain vLLM, of every cell that has both."""
    found = (cell["sides"].get(side, {}).get("speed") for cell in data["cells"])
    return [speed for speed in found if speed]


def result_lines(data: dict[str, Any]) -> Iterator[str]:
    """What was measured, one row for each cell, and what is missing."""
    weights = f"{data['dtype']}, quantisation {data['quantisation']}"
    yield (
        f"**{data['model']}** ({weights}), real weights and real text, {data['device']}, vLLM "
        f"{data['vllm']}, commit `{data['revision']}`. Tokens per second of the batch while it "
        f"decodes, median of the turns; {data['tokens']} tokens for each request. `context` counts "
        "prompt and answer. Text: "
        f"{data['text']}; `edit`: Python's standard library.{_means(data)}"
    )
    yield ""
    sides = sides_of(data)
    yield from head(
        "prompt", "T", "requests x context",
        *(f"`{side}`" if side == OURS else side for side in sides),
        "`lossless` / plain", "tokens per step", "passes per step", "greedy: equal requests",
    )  # fmt: skip
    for cell in data["cells"]:
        if cell["sides"]:
            yield row(*_cells(cell, sides))
    missing = list(_missing(data))
    if missing:
        yield ""
        yield from missing


def _means(data: dict[str, Any]) -> str:
    """Geometric means of the speeds, with the worst and the best cell."""
    told = []
    for side in sides_of(data):
        found = speeds(data, side)
        if side != "plain" and found:
            name = f"`{side}`" if side == OURS else side
            spread = f"{min(found):.2f} to {max(found):.2f}, {len(found)} cells"
            told.append(f"{name} {geometric_mean(found):.2f} ({spread})")
    if not told:
        return ""
    return f" Relative to plain vLLM, geometric mean (range): {'; '.join(told)}."


def _cells(cell: dict[str, Any], sides: list[str]) -> Iterator[str]:
    found, ours = cell["sides"], cell["sides"].get(OURS, {})
    yield cell["prompt"]
    yield f"{cell['temperature']:g}"
    yield f"{cell['requests']} x {cell['context']}"
    for side in sides:
        yield f"{found[side]['tokens_per_s']:.0f}" if side in found else "-"
    yield f"{ours['speed']:.2f}" if "speed" in ours else "-"
    yield f"{ours['tokens_per_step']:.2f}" if ours else "-"
    yield f"{ours['passes_per_step']:.2f}" if "passes_per_step" in ours else "-"
    yield _greedy(ours, found.get("plain", {}))


def _greedy(ours: dict[str, Any], plain: dict[str, Any]) -> str:
    """Requests with the reference's tokens, the largest gap where one differs; plain's beside."""
    if "greedy" not in ours:
        return "-"
    texts = []
    for side in (ours, plain):
        runs = side.get("greedy", [])
        equal, total = (sum(run[name] for run in runs) for name in ("equal", "requests"))
        gaps = [one["gap"] for run in runs for one in run["differences"]]
        texts.append(f"{equal} of {total}" + (f", gap {max(gaps):.3f}" if gaps else ""))
    return f"{texts[0]} (plain: {texts[1]})"


def _missing(data: dict[str, Any]) -> Iterator[str]:
    """Cells that could not be measured, with the reason, those alike together."""
    reasons: dict[str, list[str]] = {}
    for cell in data["cells"]:
        name = f"{cell['requests']} x {cell['context']}"
        for side, reason in cell["missing"].items():
            place = f"{side} {name}"
            if place not in reasons.setdefault(reason, []):
                reasons[reason].append(place)
    for reason, places in reasons.items():
        yield f"* Not measured: {', '.join(places)}: {reason}."
