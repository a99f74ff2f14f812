"""The README's first figures: what each kind of user gains."""

from __future__ import annotations

from collections.abc import Iterator

from .records import load
from .vllm import cell_ratios, geometric_mean


def gains_lines() -> Iterator[str]:
    ratios = cell_ratios()
    yield (
        "* **vLLM**: no rejected draft in the cache, and no slower: a verification step takes "
        f"{geometric_mean(ratios):.3f} of stock's time (geometric mean of {len(ratios)} cells, "
        f"worst {max(ratios):.3f}; H200, 8B shapes)."
    )
    generate = load("cpu/generate.json")
    speed, plain = (
        [
            short[way]["tokens_per_second"] / short["transformers generate"]["tokens_per_second"]
            for short in generate["short"].values()
        ]
        for way in ("eagle3", "none")
    )
    yield (
        f"* **transformers on a CPU**: the same tokens, {min(speed):.1f} to {max(speed):.1f} times "
        f"as fast as its own `generate` ({min(plain):.1f} to {max(plain):.1f} without drafts; "
        f"{generate['model']}, the EAGLE3 head in the package, 2 cores)."
    )
    steps = [r for r in load("h200/retrieval.json")["results"] if r["what"] == "step"]
    attention = " and ".join(
        f"{r['speedup']:.1f} times ({r['requests']} x {r['tokens']})" for r in steps
    )
    whole = next(
        one
        for one in load("h200/generate.json")["models"]["llama-3.1-8b"]
        if (one["batch"], one["context"]) == (8, 32768)
    )
    long = load("h200/vllm_specpv.json")["cells"]
    cells = ("8x32768", "24x32768", "6x122880")
    times = ", ".join(
        f"{long[c]['speed']['lossless']:.2f} times ({c.replace('x', ' x ')})" for c in cells
    )
    yield (
        f"* **Long contexts in vLLM**: the output of full attention, {times} as fast as stock vLLM "
        "with the same EAGLE3 head (H200, 8B shapes, dummy weights, acceptance set by hand)."
    )
    yield (
        f"* **Views** of {whole['view_tokens']} tokens: the attention of a verify step is "
        f"{attention} as fast as over everything, a whole step of the transformers "
        f"host {whole['full / partial']:.2f} times (8 x 32768; H200, 8B shapes)."
    )
