"""Where the time of a step goes, as benchmarks/vllm/pass_profile.py has measured it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .records import RESULTS, head, row

# Of the time in kernels: part of a step, group of kernels; `rest` is what has no column.
COLUMNS = {
    ("verify", "attention"): "verify: attention",
    ("verify", "products"): "products",
    ("verify", "rest"): "rest",
    ("sample", "rest"): "logits, sampler",
    ("passes", "attention"): "passes: attention",
    ("passes", "products"): "products",
    ("passes", "logits"): "logits",
    ("passes", "sampling"): "tokens",
    ("passes", "choice"): "blocks",
    ("passes", "lookup"): "lookups",
    ("passes", "rest"): "rest",
}
# What no part has launched is counted with the verification.
PARTS = {"sample": "sample"} | dict.fromkeys(
    ("first", "kept", "later", "close", "propose"), "passes"
)


def pass_profile_lines() -> Iterator[str]:
    files = sorted(RESULTS.glob("h200/pass_profile_*.json"))
    if not files:
        yield "Not recorded yet: `benchmarks/vllm/pass_profile.py` measures it."
    for number, file in enumerate(files):
        if number:
            yield ""
        yield from result_lines(json.loads(file.read_text(encoding="utf-8")))


def result_lines(data: dict[str, Any]) -> Iterator[str]:
    """One row for each arm and temperature, in ms of a step."""
    yield (
        f"**{data['model']}**, {data['cell'].replace('x', ' x ')} tokens, {data['device']}, vLLM "
        f"{data['vllm']}, commit `{data['commit']}`; ms of a step. `gaps` is the time in which no "
        "kernel runs: the host."
    )
    yield ""
    yield from head("T", "passes", "rows", "tokens", "step", *COLUMNS.values(), "gaps")
    for arm in data["arms"]:
        busy = sum(part["us"] for part in arm["parts"].values())
        yield row(
            f"{arm['temperature']:g}",
            arm["passes"],
            1 + arm["drafts"],
            f"{arm['tokens_per_step']:.2f}",
            f"{arm['step_ms']:.2f}",
            *(f"{us / 1e3:.2f}" for us in _columns(arm["parts"]).values()),
            f"{arm['step_ms'] - busy / 1e3:.2f}",
        )


def _columns(parts: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Microseconds of each column."""
    told = dict.fromkeys(COLUMNS, 0.0)
    for name, found in parts.items():
        part = PARTS.get(name, "verify")
        for group, us in found["groups"].items():
            told[(part, group) if (part, group) in told else (part, "rest")] += us
    return told
