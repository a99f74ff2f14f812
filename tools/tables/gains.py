"""The README's first figures: what each kind of user gains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from . import real, vllm_trees
from .records import load
from .vllm import cell_ratios, geometric_mean

TREE_ROWS = 16
FEW = 16  # requests that trees are meant for


def gains_lines() -> Iterator[str]:
    yield from _real_weights()
    yield from (_trees(), _transformers(), "", _step_time())


def _real_weights() -> Iterator[str]:
    """Of every model that was measured with its own weights."""
    for data in real.results().values():
        cells = [cell for cell in data["cells"] if "speed" in cell["sides"].get(real.OURS, {})]
        if not cells:
            continue
        sizes: dict[str, list[dict[str, Any]]] = {}
        for cell in sorted(cells, key=lambda cell: -cell["context"]):
            sizes.setdefault(f"{cell['requests']} x {cell['context']}", []).append(cell)
        found = [f"{_range(own)} at {size}" for size, own in sizes.items()]
        heats = [_temperatures(own) for own in sizes.values()]
        if len(set(heats)) > 1:  # else they are said once
            found = [f"{one} ({heat})" for one, heat in zip(found, heats, strict=True)]
        heat = f", {heats[0]}" if len(set(heats)) == 1 else ""
        turns = min(len(c["sides"][real.OURS]["runs_tokens_per_s"]) for c in cells)
        count = "one turn" if turns == 1 else f"{turns} turns"
        head = "our head" if data["head"] else "no head"
        first = found[0].replace(" at ", " plain vLLM at ").replace(" (", " tokens (")
        first += "" if "(" in first else " tokens"
        yield (
            f"* **Long contexts in vLLM, {head}: {first}**"
            f"{''.join(f', {one}' for one in found[1:])}{heat}. {data['model']}, real weights and "
            f"text, {count}, {data['device'].removeprefix('NVIDIA ')}."
        )


def _range(cells: Sequence[dict[str, Any]]) -> str:
    speeds = [cell["sides"][real.OURS]["speed"] for cell in cells]
    least = f"{min(speeds):.1f}" if min(speeds) >= 1 else f"{min(speeds):.2f}"
    return f"{least}x to {max(speeds):.1f}x"


def _temperatures(cells: Sequence[dict[str, Any]]) -> str:
    heat = sorted({cell["temperature"] for cell in cells})
    return f"T {heat[0]:g}" + (f" to {heat[-1]:g}" if len(heat) > 1 else "")


def _trees() -> str:
    """Of one number of rows, at every batch."""
    data = load(vllm_trees.TEXT)
    sides = data["parts"]["text"]
    chains = [side for side in sides if side.startswith("chain")]
    ours = {int(batch): cell["tokens_per_s"] for batch, cell in sides[f"trees{TREE_ROWS}"].items()}
    of_four, of_best = (
        {b: ours[b] / max(sides[side][str(b)]["tokens_per_s"] for side in some) for b in ours}
        for some in (["chain4"], chains)
    )
    few = {b: ratio for b, ratio in of_best.items() if b <= FEW}
    most = max(of_best)
    turns = min(cell["turns"] for cells in sides.values() for cell in cells.values())
    count = "one turn" if turns == 1 else f"{turns} turns"
    return (
        f"* **Draft trees in vLLM: {min(few.values()):.2f}x to {max(few.values()):.2f}x stock's "
        f"best chain** for {min(few)} to {max(few)} requests, {of_best[most]:.2f}x for {most}; "
        f"{min(of_four.values()):.2f}x to {max(of_four.values()):.2f}x its chain of 4. {TREE_ROWS} "
        f"rows, SmolLM2-135M-Instruct with our head, held-out prompts, greedy, {count}, full "
        f"graphs, {data['device'].removeprefix('NVIDIA ')}."
    )


def _transformers() -> str:
    """On two machines, an aarch64 and an x86_64 one."""
    files = [load(f"cpu/{name}.json") for name in ("generate", "generate_x86")]
    eagle3, plain = (
        [
            short[way]["tokens_per_second"] / short["transformers generate"]["tokens_per_second"]
            for data in files
            for short in data["short"].values()
        ]
        for way in ("eagle3", "none")
    )
    return (
        f"* **transformers on a CPU: {min(eagle3):.1f}x to {max(eagle3):.1f}x `generate`**, the "
        f"same tokens ({min(plain):.1f}x to {max(plain):.1f}x without drafts). {files[0]['model']} "
        "with our head, float32, 2 cores of an aarch64 and of an x86_64 machine."
    )


def _step_time() -> str:
    ratios = cell_ratios()
    return (
        f"Without views a vLLM verification step takes {geometric_mean(ratios):.3f} of stock's "
        f"time ({len(ratios)} cells, worst {max(ratios):.3f}; 8B shapes, dummy weights)."
    )
