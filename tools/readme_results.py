"""Makes the tables of README.md and docs/measured.md, and the plots, from benchmarks/results.

tools/readme_results.py            rewrites what stands between the markers, and the plots
tools/readme_results.py --check    exits 1 if they are not what the results say
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from coverage_plot import render as render_coverage
from readme_generate import demo_lines, generate_lines, gpu_lines
from readme_plot import Line
from readme_plot import render as render_plot

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README, MEASURED = ROOT / "README.md", ROOT / "docs" / "measured.md"
PLOT, COVERAGE = ROOT / "docs" / "attention.svg", ROOT / "docs" / "coverage.svg"
PEERS = {
    "copy": "one copy kernel, same bytes",
    "vllm": "vLLM `reshape_and_cache_flash`",
    "index_put": "`index_put_`",
    "memcpy": "memcpy, same bytes",
}


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def find(name: str) -> dict | None:
    return load(name) if (RESULTS / name).is_file() else None


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def commit_lines() -> Iterator[str]:
    data = load("h200/commit.json")
    yield (
        f"Stage and commit on {data['device']}, torch {data['torch']}, commit `{data['revision']}`:"
        f" 32 layers, 8 KV heads, D 128, bf16, page 16, {data['layout']} cache, inside CUDA graphs "
        f"over rotating data, median of {data['replays']}. A commit is one launch for all layers; "
        "vLLM's figure beside it is its 32 launches."
    )
    yield ""
    yield row("", "tokens", "ours us", "peer", "peer us", "ours / peer", "goal")
    yield row(*["---"] * 7)
    for result in data["results"]:
        ours = result["what"]
        for peer in ("vllm", "copy"):
            if peer not in result["us"]:
                continue
            ratio = result["us"][ours] / result["us"][peer]
            goal = data["goals"].get(f"{ours}/{peer}")
            yield row(
                ours,
                result["tokens"],
                f"{result['us'][ours]:.2f}",
                PEERS[peer],
                f"{result['us'][peer]:.2f}",
                f"{ratio:.2f}",
                f"<= {goal}" if goal else "",
            )


def cpu_commit_lines() -> Iterator[str]:
    data = load("cpu/commit.json")
    yield (
        f"Commit on the {data['device']} (aarch64), the same shapes, commit `{data['revision']}`: "
        "speed relative to one memcpy of the same bytes, goal at least 0.6."
    )
    yield ""
    yield row("tokens", "ours us", "memcpy us", "memcpy / ours")
    yield row(*["---"] * 4)
    for result in data["results"]:
        us = result["us"]
        yield row(
            result["tokens"],
            f"{us['commit']:.0f}",
            f"{us['memcpy']:.0f}",
            f"{us['memcpy'] / us['commit']:.2f}",
        )


def traffic_lines() -> Iterator[str]:
    data = load("h200/ncu_commit.json")
    megabytes = data["rows_per_round"] * data["bytes_per_row"] / 1e6
    yield (
        f"Memory traffic of the K/V writes alone, by Nsight Compute, commit `{data['revision']}`: "
        f"{data['requests']} requests of 1 + {data['drafts']} rows, {megabytes:.1f} MB of K/V a "
        "round, MB per round. `engine` writes every row to the cache. `nwor` is everything staging "
        "and commit do; `of it, cache` is the part that reaches the paged cache. **Cache writes "
        "fall with the rejected share; total traffic does not: accepted rows are moved twice.**"
    )
    yield ""
    schemes = {"engine": "engine", "nwor": "nwor", "nwor, cache only": "of it, cache"}
    yield row("acceptance", "scheme", "L2 writes", "DRAM writes", "DRAM reads")
    yield row(*["---"] * 5)
    for entry in data["ranges"]:
        traffic = entry["bytes_per_round"]
        yield row(
            f"{entry['acceptance']} %",
            schemes[entry["scheme"]],
            *(f"{traffic[name] / 1e6:.1f}" for name in ("l2_write", "dram_write", "dram_read")),
        )


class Attention:
    """What the runs of benchmarks/attention_gpu.py recorded, by section."""

    def __init__(self) -> None:
        self.sections: dict[str, list[dict]] = {}
        self.commits: dict[str, str] = {}
        self.device = ""
        for path in sorted((RESULTS / "h200").glob("attention*.json")):
            data = json.loads(path.read_text(encoding="utf-8"))
            self.device = data["environment"]["device"]
            for result in data["results"]:
                section = result["case"]["section"]
                self.sections.setdefault(section, []).append(result)
                self.commits[section] = data["environment"]["commit"]

    def of(self, *names: str) -> list[dict]:
        return [result for name in names for result in self.sections.get(name, [])]


def medians(result: dict) -> dict[str, float]:
    return {name: timing["median_us"] for name, timing in result["timings"].items()}


def attention_lines() -> Iterator[str]:
    data = Attention()
    results = [r for r in data.of("k1", "ragged", "view") if r["case"]["rows"] != 4]
    compared = [us for us in map(medians, results) if "FA3" in us]
    wins = sum(us["ours"] < us["FA3"] for us in compared)
    yield (
        f"Verify attention on {data.device}, commit `{data.commits['k1']}`: 32/8 heads, D 128, "
        "bf16, pages of 16 shuffled, K/V sets of at least 300 MB in turn. FA3 is vLLM's "
        "FlashAttention-3 on the same pages (it has no tree mask), the read floor a kernel that "
        f"only reads them, all in turn in one process. Faster than FA3 in {wins} of "
        f"{len(compared)} rows."
    )
    yield ""
    yield "![Verify attention, 8 rows, relative to the read floor](docs/attention.svg)"
    yield ""
    yield row("B x L", "rows", "ours us", "FA3 us", "ours / FA3", "of read floor", "tree / chain")
    yield row(*["---"] * 7)
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
        )


def rows64_lines() -> Iterator[str]:
    data = Attention()
    results = data.of("rows64")
    if not results:
        return
    yield (
        f"64 rows (256 packed rows per KV head, bound by arithmetic), commit "
        f'`{data.commits["rows64"]}`, us. `fast` is `route="fast"`: FA3 over the prefix, our '
        "kernel for the rows of the tree, and their merge. FA3 alone computes a chain."
    )
    yield ""
    yield row("B x L", "chain", "tree", "fast, tree", "FA3", "tree / FA3", "TFLOP/s")
    yield row(*["---"] * 7)
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
    yield row("B", *(len(r["case"]["lens"]) for r in results))
    yield row(*["---"] * (len(results) + 1))
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
    yield row("rows", "bf16 us", "float8 us", "bf16 / float8")
    yield row(*["---"] * 4)
    by_rows: dict[int, dict[str, float]] = {}
    for result in results:
        case = result["case"]
        by_rows.setdefault(case["rows"], {})[case["cache"]] = medians(result)["ours"]
    for rows, us in by_rows.items():
        wide, narrow = us["bfloat16"], us["float8_e4m3fn"]
        yield row(rows, f"{wide:.1f}", f"{narrow:.1f}", f"{wide / narrow:.2f}")


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
    yield row("", *(f"{count} row{'s' * (count > 1)}" for count in rows))
    yield row(*["---"] * (len(rows) + 1))
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
    return render_plot(title, ("ours, with a tree mask", "FlashAttention-3, chain"), lines)


def tree_lines() -> Iterator[str]:
    cuda, cpu = load("h200/tree.json"), load("cpu/tree.json")
    shape = cuda["shape"]
    yield (
        f"Draft trees on {cuda['device']}, commit `{cuda['revision']}`: {shape['requests']} "
        f"requests, {shape['rows']} rows, top-k {shape['best']}, {shape['steps']} steps, "
        f"vocabulary {shape['vocabulary']}, inside CUDA graphs, median of {cuda['replays']}; "
        f"and on the {cpu['device']} (aarch64), vocabulary {cpu['shape']['vocabulary']}, commit "
        f"`{cpu['revision']}`. Goal on the CPU: ten times plain Python. Reading all target "
        f"probabilities once takes {tree_us(cuda, 'sampling')['read_all']:.0f} us there; sampling "
        "reads the rows it ends in."
    )
    yield ""
    yield row("", "H200 us", "goal", "plain torch", "CPU us", "plain torch", "plain Python")
    yield row(*["---"] * 7)
    labels = {"build": "`tree_from_topk`", "greedy": "`accept_greedy`"}
    labels["sampling"] = "`accept_sampling`"
    for what, label in labels.items():
        fast, slow = tree_us(cuda, what), tree_us(cpu, what)
        yield row(
            label,
            f"{fast['ours']:.1f}",
            f"<= {cuda['goals'][what]:.0f}",
            f"{fast['torch']:.0f}",
            *(f"{slow[name]:.0f}" for name in ("ours", "torch", "python")),
        )


def tree_us(data: dict, what: str) -> dict[str, float]:
    return next(one["us"] for one in data["results"] if one["what"] == what)


def retrieval_lines() -> Iterator[str]:
    cuda, cpu = load("h200/retrieval.json"), load("cpu/retrieval.json")
    peers = load("h200/retrieval_compiled.json")
    compiled = {(r["what"], r["case"]): r["us"]["compiled"] for r in peers["results"]}
    yield (
        f"Partial verification, one request and layer, 8 rows: a refresh (scores, choice, view of "
        f"256 blocks) and a full build of the block summaries, on {cuda['device']} (32/8 heads, "
        f"D 128, bf16, commit `{cuda['revision']}`, inside CUDA graphs) and on the "
        f"{cpu['device']} (aarch64, D 64, float32, commit `{cpu['revision']}`). The peer is "
        "einsum, topk and take_along_dim in torch, which copies the chosen tokens, as it is and "
        f"by torch.compile (commit `{peers['revision']}`, the same kind of machine)."
    )
    yield ""
    yield row("", "tokens", "score", "ours us", "torch us", "compiled us", "torch / ours", "goal")
    yield row(*["---"] * 8)
    for data, kind in ((cuda, "H200"), (cpu, "CPU")):
        for result in data["results"]:
            if result["what"] not in ("refresh", "summaries"):
                continue
            score = result["case"].rsplit(", ", 1)[1]
            if result["what"] == "summaries" and score == "quest":
                continue  # the same work again
            size, _, goal = result["goal"].partition(" tokens")
            reached = result["tokens"] == int(size.rsplit(" ", 1)[-1]) if goal else False
            us = result["us"]
            faster = compiled.get((result["what"], result["case"]))
            yield row(
                f"{result['what']}, {kind}",
                result["tokens"],
                score if result["what"] == "refresh" else "",
                f"{us['ours']:.1f}",
                f"{us['torch']:.1f}",
                "" if faster is None else f"{faster:.1f}",
                f"{result['speedup']:.1f}",
                goal.rpartition(": ")[2].replace("at most", "<=").replace("at least", ">=")
                if reached
                else "",
            )
    steps = [r for r in cuda["results"] if r["what"] == "step"]
    commits = [r for r in cuda["results"] if r["what"] == "commit"]
    if steps:
        yield ""
        yield (
            "Attention of a verify step of 32 layers, 8 requests of 8 rows, over everything and "
            "over views of 4256 tokens (with what makes the views and the plan):"
        )
        yield ""
        yield row("context", "full us", "partial us", "full / partial", "goal")
        yield row(*["---"] * 5)
        for result in steps:
            yield row(
                f"{result['requests']} x {result['tokens']}",
                f"{result['us']['full']:.0f}",
                f"{result['us']['partial']:.0f}",
                f"{result['speedup']:.1f}",
                f">= {result['goal'].rpartition(' ')[2]}" if result["goal"] else "",
            )
    if commits:
        forms = [form for form in commits[0]["us"] if form != "alone"]
        yield ""
        yield (
            "A commit of 32 layers with 4 accepted rows for each request: alone in us, and what "
            "serving partial verification makes of it:"
        )
        yield ""
        yield row("requests", "alone us", *forms)
        yield row(*["---"] * (2 + len(forms)))
        for result in commits:
            more = (f"{(result['relative'][form] - 1) * 100:+.1f} %" for form in forms)
            yield row(result["requests"], f"{result['us']['alone']:.1f}", *more)


def vllm_lines() -> Iterator[str]:
    data = load("h200/vllm.json")
    cells = [cell for run in data["runs"] for cell in run["cells"]]
    ratios = [cell["ratio"] for cell in cells]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    rates = sorted({cell["acceptance"] for cell in cells})
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
    yield row("drafts", "B x L", "vLLM ms", *told)
    yield row(*["---"] * (3 + len(rates)))
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
        f"Long contexts in vLLM on {data['device']}: Llama-3.1-8B's shapes with dummy weights, an "
        "EAGLE3 head, acceptance set by hand (two of the head's four drafts, drafts of a round one "
        f"by one with {data.get('agreement', 0.95)}). {data['note']}"
    )
    yield ""
    yield row("B x L", "vLLM ms", "refresh ms", "of vLLM's", "goal", "lossless tokens/s", "goal")
    yield row(*["---"] * 7)
    for cell, (step_goal, speed_goal) in LONG_GOALS.items():
        found = data["cells"].get(cell)
        if found is None:
            continue
        ms, ratio = found["step_ms"], found.get("ratio", {}).get("refresh")
        speed = found.get("speed", {}).get("lossless")
        yield row(
            cell.replace("x", " x "),
            f"{ms['stock']:.2f}" if "stock" in ms else "",
            f"{ms['refresh']:.2f}" if "refresh" in ms else "not run",
            f"{ratio:.2f}" if ratio is not None else "",
            f"<= {step_goal}" if step_goal is not None else "",
            f"{speed:.2f} x vLLM's" if speed is not None else "not run",
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
        "included; MB per step. `cache` is what reaches the target's paged cache."
    )
    yield ""
    yield row("accepted", "", "kernels", "cache", "DRAM read", "DRAM written")
    yield row(*["---"] * 6)
    for piece in data["pieces"]:
        names = ("cache_bytes", "dram_read_bytes", "dram_write_bytes")
        megabytes = (f"{piece[name] / 1e6:.2f}" for name in names)
        accepted = f"{piece['acceptance']:.0%}".replace("%", " %")
        yield row(accepted, piece["side"], piece["kernels"], *megabytes)


# What a reader of the README asks first; everything else is told in docs/measured.md.
IN_README = (
    vllm_lines,
    attention_lines,
    lambda: generate_lines(find, row),
    lambda: gpu_lines(find, row),
)
IN_MEASURED = (
    commit_lines,
    cpu_commit_lines,
    traffic_lines,
    vllm_traffic_lines,
    long_context_lines,
    tree_lines,
    retrieval_lines,
    rows64_lines,
    odd_lines,
    fp8_lines,
    dram_lines,
    cpu_attention_lines,
)


def render(sections: Iterable[Callable[[], Iterator[str]]]) -> str:
    made = ("\n".join(section()) for section in sections)
    return "\n\n".join(text for text in made if text)


def put(text: str, name: str, made: str) -> str:
    """`text` with the part between the markers of that name replaced."""
    begin, end = f"<!-- {name}:begin", f"<!-- {name}:end -->"
    head, rest = text.split(begin)
    marker, rest = rest.split("\n", 1)
    _, tail = rest.split(end)
    lines = f"{made}\n" if made else ""
    return f"{head}{begin}{marker}\n{lines}{end}{tail}"


def main(arguments: list[str]) -> int:
    readme = put(README.read_text(encoding="utf-8"), "results", render(IN_README))
    measured = put(MEASURED.read_text(encoding="utf-8"), "results", render(IN_MEASURED))
    wanted = {
        README: put(readme, "demo", "\n".join(demo_lines(find))),
        MEASURED: measured,
        PLOT: plot(),
    }
    wanted[COVERAGE] = render_coverage(load("cpu/coverage.json"))
    if "--check" in arguments:
        stale = [
            str(path.relative_to(ROOT))
            for path, made in wanted.items()
            if not path.exists() or path.read_text(encoding="utf-8") != made
        ]
        if stale:
            files = ", ".join(stale)
            print(f"not what benchmarks/results holds: {files}: run tools/readme_results.py")
        return 1 if stale else 0
    for path, made in wanted.items():
        path.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
