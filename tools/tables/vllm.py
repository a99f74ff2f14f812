"""Steps of vLLM with the plugin."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from .records import find, head, load, row


def cell_ratios() -> list[float]:
    """Step time with the plugin to that without, in every cell."""
    return [cell["ratio"] for run in load("h200/vllm.json")["runs"] for cell in run["cells"]]


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, ratios)))


def vllm_lines() -> Iterator[str]:
    data = load("h200/vllm.json")
    ratios = cell_ratios()
    mean = geometric_mean(ratios)
    rates = sorted({cell["acceptance"] for run in data["runs"] for cell in run["cells"]})
    seconds = [run["start_s"] for run in data["runs"]]
    starts = " and ".join(f"{start['nwor']} against {start['stock']}" for start in seconds)
    yield (
        f"A verification step of vLLM {data['vllm']} with the plugin on {data['device']}, torch "
        f"{data['torch']}, commit `{data['revision']}`: Llama-3.1-8B's shapes with dummy weights, "
        "EAGLE3, model runner V2, full CUDA graphs, bf16; step time relative to vLLM's own "
        "FlashAttention-3 backend in the same process, both taking turns, by the share of drafts "
        f"accepted. Geometric mean {mean:.3f} (goal 1.00), worst {max(ratios):.3f} (goal 1.02). "
        f"Starting an engine takes {starts} s (goal: at most 3 s more)."
    )
    yield ""
    told = [f"{rate:.0%}".replace("%", " %") for rate in rates]
    yield from head("drafts", "B x L", "vLLM ms", *told)
    for run in data["runs"]:
        sizes = dict.fromkeys((cell["batch"], cell["context"]) for cell in run["cells"])
        for batch, context in sizes:
            found = [c for c in run["cells"] if (c["batch"], c["context"]) == (batch, context)]
            stock = statistics.median(ms for cell in found for ms in cell["stock_ms"])
            by_rate = {cell["acceptance"]: f"{cell['ratio']:.3f}" for cell in found}
            shares = [by_rate.get(rate, "") for rate in rates]
            yield row(run["arguments"]["drafts"], f"{batch} x {context}", f"{stock:.2f}", *shares)


LONG_GOALS = {  # step time of mode refresh, tokens per second of mode lossless, to vLLM's
    "1x4096": (None, 0.99),
    "8x32768": (0.60, 1.15),
    "24x32768": (None, 1.4),
    "6x122880": (0.35, 1.7),
}


def long_context_lines() -> Iterator[str]:
    data = load("h200/vllm_specpv.json")
    yield (
        f"Long contexts in vLLM on {data['device']}, commit `{data['commit']}`: Llama-3.1-8B's "
        "shapes with dummy weights, an EAGLE3 head, acceptance set by hand (two of the head's four "
        f"drafts, drafts of partial passes one by one with {data['agreement']})."
        + (f" {data['note']}" if data.get("note") else "")
    )
    yield ""
    yield from head(
        "B x L", "vLLM ms", "refresh ms", "of vLLM's", "goal",
        "vLLM tokens/s", "lossless", "passes", "times vLLM's", "goal",
    )  # fmt: skip
    for cell, (step_goal, speed_goal) in LONG_GOALS.items():
        found = data["cells"][cell]
        ms = found["step_ms"]
        rates = {
            side: statistics.median(run["tokens_per_s"] for run in found[side])
            for side in ("stock", "lossless")
        }
        yield row(
            cell.replace("x", " x "),
            f"{ms['stock']:.2f}",
            f"{ms['refresh']:.2f}" if "refresh" in ms else "",
            f"{found['ratio']['refresh']:.2f}" if "refresh" in ms else "",
            f"<= {step_goal}" if step_goal is not None else "",
            f"{rates['stock']:.0f}",
            f"{rates['lossless']:.0f}",
            found["lossless"][-1]["passes"],
            f"{found['speed']['lossless']:.3g}",
            f">= {speed_goal}",
        )


def vllm_traffic_lines() -> Iterator[str]:
    data = find("h200/vllm_traffic.json")
    if data is None:
        return
    first = data["pieces"][0]
    yield (
        f"What a verification step of vLLM moves, by Nsight Compute on {data['device']}, commit "
        f"`{data['revision']}`: {first['layers']} layers of Llama-3.1-8B's shapes, "
        f"{first['batch']} x {first['context']}, {first['drafts']} drafts, eager, the EAGLE3 head "
        "included; MB per step. `cache` is what reaches the target's paged cache, as counted."
    )
    yield ""
    yield from head("accepted", "", "kernels", "cache", "DRAM read", "DRAM written")
    for piece in data["pieces"]:
        names = ("cache_bytes", "dram_read_bytes", "dram_write_bytes")
        megabytes = (f"{piece[name] / 1e6:.2f}" for name in names)
        accepted = f"{piece['acceptance']:.0%}".replace("%", " %")
        yield row(accepted, piece["side"], piece["kernels"], *megabytes)
