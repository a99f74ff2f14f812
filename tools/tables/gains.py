"""The README's first figures: what each kind of user gains."""

from __future__ import annotations

from collections.abc import Iterator

from . import real, vllm_trees
from .records import load
from .vllm import cell_ratios, geometric_mean

LONG_CELLS = ("8x32768", "24x32768", "6x122880")
TREE_ROWS = 16


def gains_lines() -> Iterator[str]:
    yield from _real_weights()
    yield from (_long_contexts(), _trees(), _transformers(), _views(), "", _step_time())


def _real_weights() -> Iterator[str]:
    """Of every model that was measured with its own weights."""
    for data in real.results().values():
        speeds = real.speeds(data, real.OURS)
        if not speeds:
            continue
        cells = [cell for cell in data["cells"] if "speed" in cell["sides"].get(real.OURS, {})]
        sizes = dict.fromkeys(f"{cell['requests']} x {cell['context']}" for cell in cells)
        found = []
        for temperature in sorted({cell["temperature"] for cell in cells}):
            own = [c["sides"][real.OURS]["speed"] for c in cells if c["temperature"] == temperature]
            kind = f"temperature {temperature:g}" if temperature else "greedy"
            found.append(f"{min(own):.1f}x to {max(own):.1f}x {kind}")
        turns = min(len(c["sides"][real.OURS]["runs_tokens_per_s"]) for c in cells)
        count = "one turn" if turns == 1 else f"{turns} turns"
        head = "the head in this package" if data["head"] else "no trained head"
        yield (
            f"* **Long contexts in vLLM: {min(speeds):.1f}x to {max(speeds):.1f}x plain vLLM with "
            f"real weights and text**, {head}, mode `lossless`: {', '.join(found)}. "
            f"{data['model']}, {', '.join(sizes)} tokens, {count}, "
            f"{data['device'].removeprefix('NVIDIA ')}."
        )


def _long_contexts() -> str:
    cells = load("h200/vllm_specpv.json")["cells"]
    times = [f"{cells[name]['speed']['lossless']:.2f}x" for name in LONG_CELLS]
    sizes = [name.replace("x", " x ") for name in LONG_CELLS]
    sizes[0] = "{} requests x {} tokens".format(*LONG_CELLS[0].split("x"))
    found = ", ".join(f"{speed} at {size}" for speed, size in zip(times, sizes, strict=True))
    return (
        f"* **With a trained head: {times[0]} to {times[-1]} the throughput of stock EAGLE3**, "
        f"with the output of full attention: {found}. H200, Llama-3.1-8B shapes, **dummy "
        "weights and preset acceptance**."
    )


def _trees() -> str:
    """Of one number of rows, at every batch."""
    data = load(vllm_trees.FILE)
    sides = data["parts"]["text"]
    chains = [side for side in sides if side.startswith("chain")]
    ours = {int(batch): cell["tokens_per_s"] for batch, cell in sides[f"trees{TREE_ROWS}"].items()}
    of_four, of_best = (
        {b: ours[b] / max(sides[side][str(b)]["tokens_per_s"] for side in some) for b in ours}
        for some in (["chain4"], chains)
    )
    told = ", ".join(f"{of_best[b]:.2f}x at {b}" for b in sorted(of_best))
    turns = min(cell["turns"] for cells in sides.values() for cell in cells.values())
    count = "one turn" if turns == 1 else f"{turns} turns"
    return (
        f"* **Draft trees in vLLM: {min(of_four.values()):.2f}x to {max(of_four.values()):.2f}x "
        f"stock's chain of 4 drafts**, {TREE_ROWS} rows, real weights and text. Beside the best "
        f"chain of each batch: {told} requests. SmolLM2-135M-Instruct with the EAGLE3 head in "
        f"this package, greedy, {count}, {data['device'].removeprefix('NVIDIA ')}."
    )


def _transformers() -> str:
    data = load("cpu/generate.json")
    eagle3, plain = (
        [
            short[way]["tokens_per_second"] / short["transformers generate"]["tokens_per_second"]
            for short in data["short"].values()
        ]
        for way in ("eagle3", "none")
    )
    return (
        f"* **transformers on a CPU: {min(eagle3):.1f}x to {max(eagle3):.1f}x `generate`**, the "
        f"same tokens ({min(plain):.1f}x to {max(plain):.1f}x without drafts). {data['model']} "
        "with the EAGLE3 head in this package, float32, 2 cores."
    )


def _views() -> str:
    steps = [r for r in load("h200/retrieval.json")["results"] if r["what"] == "step"]
    whole = next(
        one
        for one in load("h200/generate.json")["models"]["llama-3.1-8b"]
        if (one["batch"], one["context"]) == (8, 32768)
    )
    first, last = (f"{one['speedup']:.1f}x" for one in (steps[0], steps[-1]))
    sizes = " and ".join(f"{one['requests']} x {one['tokens']}" for one in steps)
    return (
        f"* **Partial views: {first} to {last} faster attention** over {whole['view_tokens']} "
        f"tokens instead of all ({sizes}). A whole step of the transformers host is "
        f"{whole['full / partial']:.2f}x faster at 8 x 32768. H200, Llama-3.1-8B shapes."
    )


def _step_time() -> str:
    ratios = cell_ratios()
    return (
        f"And no slower without views: a vLLM verification step takes {geometric_mean(ratios):.3f} "
        f"of stock's time (geometric mean of {len(ratios)} cells, worst {max(ratios):.3f})."
    )
