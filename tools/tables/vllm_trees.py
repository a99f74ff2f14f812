"""Draft trees in vLLM beside stock chains of the same head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .records import head, load, row

TEXT, SHAPES = "h200/vllm_trees.json", "h200/vllm_trees_shapes.json"
_TREES = ("trees4", "trees8", "trees16", "trees32", "trees64", "trees")
_TITLES = {"text": "SmolLM2-135M-Instruct, shipped head", "shapes": "Llama-3.1-8B shapes"}


def vllm_tree_lines() -> Iterator[str]:
    yield from _lines_of(load(TEXT))
    yield ""
    yield from _lines_of(load(SHAPES))


def _lines_of(data: dict[str, Any]) -> Iterator[str]:
    parts = data["parts"]
    versions = f"vLLM {data['vllm']}, torch {data['torch']}, commit `{data['commit']}`"
    yield f"{data['device']}, {versions}."
    if "verify" in parts:
        yield from _verify_lines(parts["verify"])
    for part, title in _TITLES.items():
        if part in parts:
            yield from _speed_lines(title, parts[part])


def _verify_lines(sides: dict[str, Any]) -> Iterator[str]:
    batches = sorted({int(batch) for cells in sides.values() for batch in cells})
    yield ""
    yield "Time of the target in a step of stock vLLM, 8B shapes, ms:"
    yield ""
    yield from head("rows of a request", *(_requests(batch) for batch in batches))
    for side, cells in sorted(sides.items(), key=lambda item: int(item[0].removeprefix("rows"))):
        times = (cells.get(str(batch), {}).get("verify_ms") for batch in batches)
        yield row(side.removeprefix("rows"), *("-" if ms is None else f"{ms:.2f}" for ms in times))


def _speed_lines(title: str, sides: dict[str, Any]) -> Iterator[str]:
    """Tokens per second; trees also as a ratio to the best chain."""
    chains = [side for side in sides if side.startswith("chain")]
    shown = [side for side in _TREES if side in sides]
    batches = sorted({int(batch) for cells in sides.values() for batch in cells})
    yield ""
    yield f"Tokens per second, {title}; in brackets the ratio to the best chain of stock vLLM:"
    yield ""
    trees = [
        "chosen" if side == "trees" else f"{side.removeprefix('trees')} rows" for side in shown
    ]
    single = [side for side in ("plain", "chain4") if side in sides]
    titles = ["chain of 4" if side == "chain4" else side for side in single]
    yield from head("requests", *titles, "best chain", *trees)
    for batch in map(str, batches):
        speeds = {
            side: cells[batch]["tokens_per_s"] for side, cells in sides.items() if batch in cells
        }
        best = max((side for side in chains if side in speeds), key=speeds.__getitem__, default="")
        found = [f"{speeds[side]:.0f}" if side in speeds else "-" for side in single]
        found.append(f"{speeds[best]:.0f} (of {best.removeprefix('chain')})" if best else "-")
        for side in shown:
            ratio = f" ({speeds[side] / speeds[best]:.2f})" if side in speeds and best else ""
            found.append(f"{speeds[side]:.0f}{ratio}" if side in speeds else "-")
        yield row(batch, *found)


def _requests(batch: int) -> str:
    return f"{batch} request" + "s" * (batch > 1)
