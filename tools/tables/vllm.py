"""Steps of vLLM with the plugin."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from .records import RESULTS, head, load, row


def cell_ratios() -> list[float]:
    """Step time with the plugin to that without, in every cell."""
    return [cell["ratio"] for run in load("h200/vllm.json")["runs"] for cell in run["cells"]]


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def step_lines() -> Iterator[str]:
    data = load("h200/vllm.json")
    ratios = cell_ratios()
    rates = sorted({cell["acceptance"] for run in data["runs"] for cell in run["cells"]})
    seconds = [run["start_s"] for run in data["runs"]]
    starts = " and ".join(f"{start['nwor']} s (stock {start['stock']} s)" for start in seconds)
    modes = {run["arguments"].get("compile", "off") for run in data["runs"]}
    compiled = "vLLM's default compile mode" if modes == {"default"} else "full CUDA graphs"
    yield (
        f"vLLM {data['vllm']} on {data['device']}, torch {data['torch']}, commit "
        f"`{data['revision']}`. Llama-3.1-8B shapes with dummy weights, EAGLE3, model runner V2, "
        f"{compiled}, bf16. Each cell is the step time with the plugin divided by the step "
        "time of stock vLLM with FlashAttention-3, by the share of drafts accepted. Both engines "
        f"took turns in one process. Geometric mean {geometric_mean(ratios):.3f}, worst "
        f"{max(ratios):.3f}. An engine starts in {starts}."
    )
    yield ""
    titles = [f"{rate:.0%}".replace("%", " %") for rate in rates]
    yield from head("drafts", "B x L", "vLLM ms", *titles)
    for run in data["runs"]:
        sizes = dict.fromkeys((cell["batch"], cell["context"]) for cell in run["cells"])
        for batch, context in sizes:
            found = [c for c in run["cells"] if (c["batch"], c["context"]) == (batch, context)]
            stock = statistics.median(ms for cell in found for ms in cell["stock_ms"])
            by_rate = {cell["acceptance"]: f"{cell['ratio']:.3f}" for cell in found}
            shares = [by_rate.get(rate, "") for rate in rates]
            yield row(run["arguments"]["drafts"], f"{batch} x {context}", f"{stock:.2f}", *shares)


LONG, LONG_WITHOUT_HEAD = "h200/vllm_specpv.json", "h200/vllm_specpv_self.json"


def rate(cell: dict, side: str) -> float:
    """Tokens per second of one side, the median of its processes."""
    return statistics.median(run["tokens_per_s"] for run in cell[side])


def summary_lines() -> Iterator[str]:
    """The README's one table: tokens per second over long contexts."""
    data = load(LONG)
    yield (
        f"Tokens per second over long contexts: vLLM 0.26.0 on {data['device']}, Llama-3.1-8B "
        "shapes, dummy weights, one EAGLE3 head on all sides, preset acceptance (2 of 4 head "
        f"drafts; {data['agreement']['lossless']} for each draft of a partial pass)."
    )
    yield ""
    yield from head("requests x tokens", "stock", "`lossless`", "speedup", "`refresh` (lossy)")
    for name, cell in data["cells"].items():
        lossy = f"{rate(cell, 'refresh'):.0f}" if cell.get("refresh") else "-"
        yield row(
            name.replace("x", " x "),
            *(f"{rate(cell, side):.0f}" for side in ("stock", "lossless")),
            f"{cell['speed']['lossless']:.3g}",
            lossy,
        )


def long_context_lines() -> Iterator[str]:
    """With a head, and without one where that is recorded."""
    yield from _head_lines(load(LONG))
    if (RESULTS / LONG_WITHOUT_HEAD).exists():
        yield ""
        yield from _self_lines(load(LONG_WITHOUT_HEAD))


def _head_lines(data: dict) -> Iterator[str]:
    yield (
        f"{data['device']}, commit `{data['commit']}`. Llama-3.1-8B shapes with dummy weights, an "
        "EAGLE3 head, preset acceptance: two of the head's four drafts, and each draft of a "
        f"partial pass with probability {data['agreement']['lossless']}. "
        "Step times include the head's drafting."
    )
    yield ""
    yield from head(
        "B x L", "stock ms", "`refresh` ms", "`refresh` / stock",
        "stock tokens/s", "`lossless` tokens/s", "passes", "`lossless` / stock",
    )  # fmt: skip
    for name, cell in data["cells"].items():
        ms = cell["step_ms"]
        yield row(
            name.replace("x", " x "),
            f"{ms['stock']:.2f}",
            f"{ms['refresh']:.2f}" if "refresh" in ms else "-",
            f"{cell['ratio']['refresh']:.2f}" if "refresh" in ms else "-",
            *(f"{rate(cell, side):.0f}" for side in ("stock", "lossless")),
            f"{cell['lossless'][-1]['passes']:.2g}",
            f"{cell['speed']['lossless']:.3g}",
        )


def _self_lines(data: dict) -> Iterator[str]:
    yield (
        f"The same shapes without a head, commit `{data['commit']}`: a pass yields 1.5 tokens, and "
        f"a full step confirms each draft of a chain with probability {data['agreement']['self']}."
    )
    yield ""
    yield from head(
        "B x L", "plain ms", "`lossless` ms", "plain tokens/s", "`lossless` tokens/s", "passes",
        "`lossless` / plain",
    )  # fmt: skip
    for name, cell in data["cells"].items():
        yield row(
            name.replace("x", " x "),
            *(f"{cell['step_ms'][side]:.2f}" for side in ("plain", "self")),
            *(f"{rate(cell, side):.0f}" for side in ("plain", "self")),
            f"{cell['self'][-1]['passes']:.2g}",
            f"{cell['speed']['self']:.3g}",
        )


def traffic_lines() -> Iterator[str]:
    data = load("h200/vllm_traffic.json")
    first = data["pieces"][0]
    yield (
        f"Nsight Compute on {data['device']}, commit `{data['revision']}`: {first['layers']} "
        f"layers of Llama-3.1-8B shapes, {first['batch']} x {first['context']}, "
        f"{first['drafts']} drafts, eager, EAGLE3 head included; MB per step. `cache` is what is "
        "written to the target's paged cache."
    )
    yield ""
    yield from head("accepted", "", "kernels", "cache", "DRAM read", "DRAM written")
    for piece in data["pieces"]:
        names = ("cache_bytes", "dram_read_bytes", "dram_write_bytes")
        megabytes = (f"{piece[name] / 1e6:.2f}" for name in names)
        accepted = f"{piece['acceptance']:.0%}".replace("%", " %")
        yield row(accepted, piece["side"], piece["kernels"], *megabytes)


def prefix_reuse_lines() -> Iterator[str]:
    data = load("cpu/vllm_prefix_reuse.json")
    yield (
        f"vLLM {data['vllm']} on the CPU, torch {data['torch']}, commit `{data['commit']}`: "
        f"{data['model']}, {data['dtype']}, greedy, {data['conversations']} conversations of "
        f"{data['turns']} turns at once, {data['answer_tokens']} tokens an answer, pages of "
        f"{data['page']} tokens. A prompt is all that was said before and a new question. The most "
        "that can be found are the whole pages before it."
    )
    yield ""
    yield from head("", "tokens found", "of the most", "answers equal to plain vLLM's")
    for side in data["sides"]:
        share = side["found"] / side["possible"]
        equal = f"{side['equal_answers']} of {side['answers']}"
        yield row(side["side"], side["found"], f"{100 * share:.0f} %", equal)
