"""Verify attention on the GPU and the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from .attention_plot import Line, render
from .records import RESULTS, head, load, row

TIMED = ("h200/attention.json", "h200/attention_torch.json")  # no section is in both


def case_of(result: dict) -> tuple:
    case = result["case"]
    return result["name"], case["rows"], case["section"], case["cache"]


def medians(result: dict) -> dict[str, float]:
    return {name: timing["median_us"] for name, timing in result["timings"].items()}


class FlashInfer:
    """A run that had FlashInfer beside our kernels: how many times as long as ours it took."""

    KINDS = (("FlashInfer", "ours", "chains"), ("FlashInfer tree", "ours tree", "trees"))

    def __init__(self) -> None:
        run = load("h200/attention_flashinfer.json")
        self.commit = run["environment"]["commit"]
        self._us = {case_of(result): medians(result) for result in run["results"]}

    def ratio(self, result: dict, peer: str, ours: str) -> float | None:
        us = self._us.get(case_of(result), {})
        return us[peer] / us[ours] if peer in us else None

    def text(self, results: list[dict]) -> str:
        parts = []
        for peer, ours, kind in self.KINDS:
            ratios = [found for one in results if (found := self.ratio(one, peer, ours))]
            parts.append(f"{kind} {min(ratios):.2f} to {max(ratios):.2f} times as long as ours")
        return (
            " FlashInfer is its paged prefill by the kernels it calls fa2, which split prefixes; "
            "its tree mask covers the prefix as well, and its rows are in the pages already. In a "
            f"run of its own (commit `{self.commit}`) it took for {', for '.join(parts)}."
        )


class Attention:
    """What the runs of benchmarks/attention_gpu.py recorded, by section."""

    def __init__(self) -> None:
        self.sections: dict[str, list[dict]] = {}
        self.commits: dict[str, str] = {}
        checked = load("h200/attention_errors.json")
        for timed in map(load, TIMED):
            self.device = timed["environment"]["device"]
            for result in timed["results"]:
                section = result["case"]["section"]
                self.sections.setdefault(section, []).append(result)
                self.commits[section] = timed["environment"]["commit"]
        self.errors, self.errors_commit = checked["results"], checked["environment"]["commit"]
        self.flash_infer = FlashInfer()

    def of(self, *names: str) -> list[dict]:
        return [result for name in names for result in self.sections.get(name, [])]


def error_text(data: Attention) -> str:
    """The range of errors relative to FlashAttention-3's, over all shapes that have both."""
    found = [r["error_stats"] for r in data.errors if "FA3" in r["error_stats"]]
    if not found:
        return ""
    ranges = []
    for kind, name in (("mean", "mean"), ("rms", "root mean square"), ("max", "largest error")):
        ratios = [stats["ours"][kind] / stats["FA3"][kind] for stats in found]
        ranges.append(f"{name} {min(ratios):.2f} to {max(ratios):.2f} times")
    return (
        f" Errors against float64, relative to FA3's on the same data, over {len(found)} shapes of "
        f"bf16 and fp16 and heads of 64 to 256 channels (commit `{data.errors_commit}`): "
        f"{', '.join(ranges)}."
    )


def sustained_text(data: Attention) -> str:
    """Times under load, where there are some."""
    parts = []
    for result in data.of("sustained"):
        us, case = medians(result), result["case"]
        parts.append(
            f" Replayed for three seconds without a pause, {result['name']} with {case['rows']} "
            f"rows takes {us['ours']:.0f} us, FA3 {us['FA3']:.0f} (goal {case['goal_us']:.0f})."
        )
    return "".join(parts)


def attention_lines() -> Iterator[str]:
    data = Attention()
    results = [r for r in data.of("k1", "ragged", "view") if r["case"]["rows"] != 4]
    compared = [us for us in map(medians, results) if "FA3" in us]
    wins = sum(us["ours"] < us["FA3"] for us in compared)
    goals = [(medians(r)["ours"], r["case"]["goal_us"]) for r in results if r["case"]["goal_us"]]
    met = sum(ours <= goal for ours, goal in goals)
    yield (
        f"Verify attention on {data.device}, commit `{data.commits['k1']}`: 32/8 heads, D 128, "
        "bf16, pages of 16 shuffled, K/V sets of at least 300 MB in turn. FA3 is vLLM's "
        "FlashAttention-3 on the same pages (it has no tree mask), planned ahead as ours, the read "
        "floor a kernel that only reads them, all in turn in one process. Faster than FA3 in "
        f"{wins} of {len(compared)} rows (goal: in all), at or below its goal in {met} of "
        f"{len(goals)}."
        f"{sustained_text(data)}{data.flash_infer.text(results)}{error_text(data)}"
    )
    yield ""
    yield "![Verify attention, 8 rows, relative to the read floor](docs/attention.svg)"
    yield ""
    yield from head(
        *("B x L", "rows", "ours us", "goal us", "FA3 us", "ours / FA3"),
        *("of read floor", "tree / chain"),
        *("FlashInfer / ours", "of trees"),
    )
    for result in results:
        case, us = result["case"], medians(result)
        peer = us.get("FA3")
        yield row(
            result["name"] + (" per-head view" if case["view"] else ""),
            case["rows"],
            f"{us['ours']:.1f}",
            f"{case['goal_us']:.0f}" if case["goal_us"] else "-",
            f"{peer:.1f}" if peer else "-",
            f"{us['ours'] / peer:.2f}" if peer else "-",
            f"{100 * us['read'] / us['ours']:.0f} %",
            f"{us['ours tree'] / us['ours']:.2f}",
            *(
                f"{ratio:.2f}" if (ratio := data.flash_infer.ratio(result, peer, ours)) else "-"
                for peer, ours, _ in FlashInfer.KINDS
            ),
        )


def rows64_lines() -> Iterator[str]:
    data = Attention()
    results = data.of("rows64")
    if not results:
        return
    yield (
        f"64 rows (256 packed rows per KV head, bound by arithmetic), commit "
        f'`{data.commits["rows64"]}`, us. `fast` is `route="fast"`: FA3 over the prefix, our '
        "kernel for the rows of the tree, and their merge. FA3 alone computes a chain. Goal: a "
        "tree in FA3's time."
    )
    yield ""
    yield from head("B x L", "chain", "tree", "fast, tree", "FA3", "tree / FA3", "TFLOP/s")
    for result in results:
        us = medians(result)
        peer, fast = us.get("FA3"), us.get("fast tree")
        lens, rows = result["case"]["lens"], result["case"]["rows"]
        flop = 4 * 32 * 128 * rows * sum(n + rows for n in lens)
        yield row(
            result["name"],
            f"{us['ours']:.1f}",
            f"{us['ours tree']:.1f}",
            f"{fast:.1f}" if fast else "-",
            f"{peer:.1f}" if peer else "-",
            f"{us['ours tree'] / peer:.2f}" if peer else "-",
            f"{flop / us['ours tree'] / 1e6:.0f}",
        )


def odd_lines() -> Iterator[str]:
    data = Attention()
    results = data.of("odd")
    if not results:
        return
    yield (
        f"Batches that do not fit the number of SMs: B x 32768, 8 rows, commit "
        f"`{data.commits['odd']}`, TB/s of K/V read. Goal at least 4.1."
    )
    yield ""
    yield from head("B", *(len(r["case"]["lens"]) for r in results))
    for label, name in (("ours", "ours"), ("FA3", "FA3")):
        rates = [(r["kv_bytes"], medians(r).get(name)) for r in results]
        if not any(us for _, us in rates):
            continue
        yield row(label, *(f"{size / us / 1e6:.2f}" if us else "-" for size, us in rates))


def fp8_lines() -> Iterator[str]:
    data = Attention()
    results = data.of("fp8")
    if not results:
        return
    commit = data.commits["fp8"]
    yield f"Float8 cache, 8 x 32768, commit `{commit}`. Goal: at least 1.7 times as fast as bf16."
    yield ""
    yield from head("rows", "bf16 us", "float8 us", "bf16 / float8")
    by_rows: dict[int, dict[str, float]] = {}
    for result in results:
        case = result["case"]
        by_rows.setdefault(case["rows"], {})[case["cache"]] = medians(result)["ours"]
    for rows, us in by_rows.items():
        wide, narrow = us["bfloat16"], us["float8_e4m3fn"]
        yield row(rows, f"{wide:.1f}", f"{narrow:.1f}", f"{wide / narrow:.2f}")


def torch_lines() -> Iterator[str]:
    data = Attention()
    results = data.of("torch")
    if not results:
        return
    yield (
        f"Beside attention inside torch, commit `{data.commits['torch']}`, us: a tree by our "
        "kernel, and over contiguous K/V, which they get for free, by SDPA with a boolean mask "
        "(rows folded into the group) and by compiled flex attention; a chain by LibTorch's "
        "FlashAttention-2, as it is called and with rows folded (the prefix alone)."
    )
    yield ""
    peers = ("SDPA tree", "flex tree", "FA2", "FA2 folded")
    yield from head("B x L", "rows", "ours, tree", "SDPA, tree", "flex, tree", "FA2", "FA2 folded")
    for result in results:
        us = medians(result)
        told = (f"{us[name]:.1f}" if name in us else "-" for name in peers)
        yield row(result["name"], result["case"]["rows"], f"{us['ours tree']:.1f}", *told)


def dram_lines() -> Iterator[str]:
    if not (RESULTS / "h200" / "ncu_attention.json").exists():
        return
    data = load("h200/ncu_attention.json")
    ratios = ", ".join(
        f"{one['dram_read'] / one['kv_bytes']:.3f} ({one['name']}, {one['rows']} rows)"
        for one in data["ranges"]
    )
    yield (
        f"DRAM bytes read, by Nsight Compute, commit `{data['commit']}`, relative to the K/V that "
        f"has to be read: {ratios}. Goal at most {data['goal']}."
    )


def cpu_attention_lines() -> Iterator[str]:
    if not (RESULTS / "cpu" / "attention.json").exists():
        return
    data = load("cpu/attention.json")
    yield (
        f"Verify attention on the {data['device']} (aarch64), commit `{data['revision']}`: how "
        "many times as fast as torch's SDPA with a boolean mask, which gets contiguous K/V for "
        "free. Goal 1.5 with 1 to 8 rows, 1.0 with 32."
    )
    yield ""
    by_shape: dict[tuple[str, str, str, str], dict[int, float]] = {}
    for result in data["results"]:
        size, _, heads, dim, dtype = result["case"].split("  ")
        shape = (dtype, heads, dim, size)
        by_shape.setdefault(shape, {})[result["rows"]] = 1 / result["ratio"]["SDPA"]
    rows = sorted({count for ratios in by_shape.values() for count in ratios})
    yield from head("", *(f"{count} row{'s' * (count > 1)}" for count in rows))
    for shape, ratios in by_shape.items():
        yield row(", ".join(shape), *(f"{ratios[count]:.1f}" for count in rows))


def plot() -> str:
    """Every shape of the K1 table at 8 rows, the ragged batch and the views."""
    lines = []
    for result in Attention().of("k1", "ragged", "view"):
        if result["case"]["rows"] != 8:
            continue
        us = medians(result)
        values = tuple(us[n] / us["read"] if n in us else None for n in ("ours tree", "FA3"))
        lines.append(Line(result["name"] + (" view" if result["case"]["view"] else ""), values))
    title = "Verify attention, 8 rows per request, H200: time relative to reading the pages once"
    return render(title, ("ours, with a tree mask", "FlashAttention-3, chain"), lines)
