"""Verify attention on the GPU."""

from __future__ import annotations

from collections.abc import Iterator

from .attention_plot import Line, render
from .records import RESULTS, head, load, row

# No section is in two of them.
TIMED = ("h200/attention.json", "h200/attention_models.json", "h200/attention_torch.json")
CHAIN = "h200/attention_chain.json"
MODELS = {(14, 2, 64): "Qwen2.5-0.5B", (12, 2, 128): "Qwen2.5-1.5B", (9, 3, 64): "SmolLM2-135M"}


def case_of(result: dict) -> tuple:
    case = result["case"]
    return result["name"], case["rows"], case["section"], case["cache"]


def medians(result: dict) -> dict[str, float]:
    return {name: timing["median_us"] for name, timing in result["timings"].items()}


class FlashInfer:
    """A run that had FlashInfer beside our kernels: its time divided by ours."""

    CHAIN, TREE = ("FlashInfer", "ours"), ("FlashInfer tree", "ours tree")

    def __init__(self) -> None:
        run = load("h200/attention_flashinfer.json")
        self.commit = run["environment"]["commit"]
        self._us = {case_of(result): medians(result) for result in run["results"]}

    def ratio(self, result: dict, kind: tuple[str, str]) -> float | None:
        us, (peer, ours) = self._us.get(case_of(result), {}), kind
        return us[peer] / us[ours] if peer in us else None

    def text(self, result: dict, kind: tuple[str, str]) -> str:
        found = self.ratio(result, kind)
        return "-" if found is None else f"{found:.2f}"


class Attention:
    """What the runs of benchmarks/attention_gpu.py recorded, by section."""

    def __init__(self) -> None:
        self.sections: dict[str, list[dict]] = {}
        self.commits: dict[str, str] = {}
        for timed in map(load, TIMED):
            self.device = timed["environment"]["device"]
            for result in timed["results"]:
                section = result["case"]["section"]
                self.sections.setdefault(section, []).append(result)
                self.commits[section] = timed["environment"]["commit"]

    def of(self, *names: str) -> list[dict]:
        return [result for name in names for result in self.sections.get(name, [])]


def attention_lines() -> Iterator[str]:
    data, flash_infer = Attention(), FlashInfer()
    results = [r for r in data.of("k1", "ragged", "view") if r["case"]["rows"] != 4]
    compared = [us for us in map(medians, results) if "FA3" in us]
    wins = sum(us["ours"] < us["FA3"] for us in compared)
    yield (
        f"{data.device}, commit `{data.commits['k1']}`: 32/8 heads, D 128, bf16, shuffled pages of "
        "16 tokens, K/V sets of at least 300 MB in turn. FA3 is vLLM's FlashAttention-3 over the "
        "same pages, planned once for all layers as ours is; it has no tree mask. `read share` is "
        "the time of a kernel that only reads the pages, divided by ours. All kernels took turns "
        f"in one process. Ours is faster than FA3 in {wins} of {len(compared)} rows. The last two "
        "columns are from a run with FlashInfer in the same process (commit "
        f"`{flash_infer.commit}`): its paged prefill, backend `fa2`, with the rows already in the "
        "pages; its tree mask covers the prefix too."
    )
    for result in data.of("sustained"):
        us = medians(result)
        yield (
            f"Replayed for three seconds without a pause, {result['name']} with "
            f"{result['case']['rows']} rows takes {us['ours']:.0f} us (FA3 {us['FA3']:.0f} us)."
        )
    yield ""
    yield "![Verify attention, 8 rows, relative to the read floor](attention.svg)"
    yield ""
    yield from head(
        *("B x L", "rows", "ours us", "FA3 us", "ours / FA3", "read share", "tree / chain"),
        *("FlashInfer / ours, chain", "FlashInfer / ours, tree"),
    )
    for result in results:
        case, us = result["case"], medians(result)
        peer = us.get("FA3")
        yield row(
            result["name"] + (" per-head view" if case["view"] else ""),
            case["rows"],
            f"{us['ours']:.1f}",
            f"{peer:.1f}" if peer else "-",
            f"{us['ours'] / peer:.2f}" if peer else "-",
            f"{100 * us['read'] / us['ours']:.0f} %",
            f"{us['ours tree'] / us['ours']:.2f}",
            flash_infer.text(result, FlashInfer.CHAIN),
            flash_infer.text(result, FlashInfer.TREE),
        )


def error_lines() -> Iterator[str]:
    """The range of errors relative to FlashAttention-3's, over all shapes that have both."""
    data = load("h200/attention_errors.json")
    found = [r["error_stats"] for r in data["results"] if "FA3" in r["error_stats"]]
    yield (
        f"Commit `{data['environment']['commit']}`: {len(found)} shapes, bf16 and fp16, heads of "
        "64 to 256 channels, both kernels on the same data."
    )
    yield ""
    yield from head("error against float64", "ours / FA3, least", "most", "shapes above 1")
    for kind, name in (("mean", "mean"), ("rms", "root mean square"), ("max", "largest")):
        ratios = [stats["ours"][kind] / stats["FA3"][kind] for stats in found]
        above = sum(ratio > 1 for ratio in ratios)
        yield row(name, f"{min(ratios):.2f}", f"{max(ratios):.2f}", above)


def rows64_lines() -> Iterator[str]:
    data = Attention()
    yield (
        f"Commit `{data.commits['rows64']}`, us. 64 rows are 256 packed rows per KV head, which "
        "arithmetic limits. FA3 computes a chain."
    )
    yield ""
    yield from head("B x L", "chain", "tree", "FA3", "tree / FA3", "TFLOP/s")
    for result in data.of("rows64"):
        us = medians(result)
        peer = us.get("FA3")
        lens, rows = result["case"]["lens"], result["case"]["rows"]
        flop = 4 * 32 * 128 * rows * sum(n + rows for n in lens)
        yield row(
            result["name"],
            f"{us['ours']:.1f}",
            f"{us['ours tree']:.1f}",
            f"{peer:.1f}" if peer else "-",
            f"{us['ours tree'] / peer:.2f}" if peer else "-",
            f"{flop / us['ours tree'] / 1e6:.0f}",
        )


def odd_lines() -> Iterator[str]:
    data = Attention()
    results = data.of("odd")
    yield f"B x 32768, 8 rows, commit `{data.commits['odd']}`, TB/s of K/V read."
    yield ""
    yield from head("B", *(len(r["case"]["lens"]) for r in results))
    for name in ("ours", "FA3"):
        rates = [(r["kv_bytes"], medians(r).get(name)) for r in results]
        yield row(name, *(f"{size / us / 1e6:.2f}" if us else "-" for size, us in rates))


def float8_lines() -> Iterator[str]:
    data = Attention()
    yield (
        f"Commit `{data.commits['fp8']}`. Errors are against float64 over what the cache holds: "
        "float8 caches are computed with in float16, which has three bits more than bfloat16."
    )
    yield ""
    yield from head(
        *("B x L", "rows", "bf16 us", "float8 us", "bf16 / float8"),
        *("mean error, bf16", "float8", "largest, bf16", "float8"),
    )
    by_shape: dict[tuple[str, int], dict[str, dict]] = {}
    for result in data.of("fp8"):
        case = result["case"]
        by_shape.setdefault((result["name"], case["rows"]), {})[case["cache"]] = result
    for (name, rows), results in by_shape.items():
        both = [results[cache] for cache in ("bfloat16", "float8_e4m3fn")]
        wide, narrow = (medians(result)["ours"] for result in both)
        errors = [r["error_stats"]["ours"][kind] for kind in ("mean", "max") for r in both]
        times = f"{wide:.1f}", f"{narrow:.1f}", f"{wide / narrow:.2f}"
        yield row(name, rows, *times, *(f"{error:.1e}" for error in errors))


def chain_lines() -> Iterator[str]:
    """Attention behind the launches of a layer."""
    if not (RESULTS / CHAIN).exists():
        yield "No run of `benchmarks/attention_chain.py` is recorded."
        return
    data = load(CHAIN)
    where = data["environment"]
    yield (
        f"{where['device']}, commit `{where['commit']}`: us of a layer of 32/8 heads of 128 "
        "channels: a product, a rotation, the write of the rows, attention. Early: with "
        "`prefix_ready`, attention reads the prefix while the write still runs. The ratio is that "
        "of what attention adds."
    )
    yield ""
    yield from head("B x L", "rows", "without attention", "with it", "early", "ratio")
    for result in data["results"]:
        us = result["us"]
        times = us["none"], us.get("held", us["off"]), us["early"]
        told = (f"{time:.1f}" for time in times)
        yield row(result["name"], result["rows"], *told, f"{result['ratio']:.2f}")


def models_lines() -> Iterator[str]:
    data = Attention()
    yield f"Commit `{data.commits['models']}`, us; in brackets the ratio to FA3."
    yield ""
    found: dict[tuple[str, str, str], dict[int, dict[str, float]]] = {}
    for result in data.of("models"):
        case = result["case"]
        heads = case["heads"], case["kv_heads"], case["head_dim"]
        shape = MODELS[heads], f"{heads[0]}/{heads[1]} x {heads[2]}", result["name"]
        found.setdefault(shape, {})[case["rows"]] = medians(result)
    numbers = sorted({rows for by_rows in found.values() for rows in by_rows})
    counted = (f"{rows} row{'s' * (rows > 1)}" for rows in numbers)
    yield from head("model", "heads x channels", "B x L", *counted)
    for shape, by_rows in found.items():
        times = (by_rows[rows] for rows in numbers)
        yield row(*shape, *(f"{us['ours']:.1f} ({us['ours'] / us['FA3']:.2f})" for us in times))


def torch_lines() -> Iterator[str]:
    data = Attention()
    yield (
        f"Commit `{data.commits['torch']}`, us. The peers read contiguous K/V, whose gathering is "
        "not counted. For a tree: SDPA with a boolean mask (rows folded into the head group) and "
        "compiled flex attention. For a chain: LibTorch's FlashAttention-2, as called and with "
        "rows folded (the prefix alone)."
    )
    yield ""
    peers = ("SDPA tree", "flex tree", "FA2", "FA2 folded")
    yield from head("B x L", "rows", "ours, tree", "SDPA, tree", "flex, tree", "FA2", "FA2 folded")
    for result in data.of("torch"):
        us = medians(result)
        times = (f"{us[name]:.1f}" if name in us else "-" for name in peers)
        yield row(result["name"], result["case"]["rows"], f"{us['ours tree']:.1f}", *times)


def dram_lines() -> Iterator[str]:
    data = load("h200/ncu_attention.json")
    yield f"Nsight Compute, commit `{data['commit']}`."
    yield ""
    yield from head("B x L", "rows", "DRAM bytes read / bytes of K/V")
    for one in data["ranges"]:
        yield row(one["name"], one["rows"], f"{one['dram_read'] / one['kv_bytes']:.3f}")


def plot() -> str:
    """Every shape of the first table at 8 rows, the ragged batch and the views."""
    lines = []
    for result in Attention().of("k1", "ragged", "view"):
        if result["case"]["rows"] != 8:
            continue
        us = medians(result)
        values = tuple(us[n] / us["read"] if n in us else None for n in ("ours tree", "FA3"))
        lines.append(Line(result["name"] + (" view" if result["case"]["view"] else ""), values))
    title = "Verify attention, 8 rows per request, H200: time relative to reading the pages once"
    return render(title, ("ours, with a tree mask", "FlashAttention-3, chain"), lines)
