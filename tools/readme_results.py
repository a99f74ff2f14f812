"""Makes the README's tables from benchmarks/results, so that no figure is typed by hand.

tools/readme_results.py            rewrites the part of README.md between the markers
tools/readme_results.py --check    exits 1 if it is not what the results say
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results:begin", "<!-- results:end -->"
PEERS = {
    "copy": "one copy kernel, same bytes",
    "vllm": "vLLM `reshape_and_cache_flash`",
    "index_put": "`index_put_`",
    "memcpy": "memcpy, same bytes",
}


def load(name: str) -> dict:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


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


def attention_lines() -> Iterator[str]:
    data = load("h200/attention.json")
    environment = data["environment"]
    yield (
        f"Verify attention on {environment['device']}, commit `{environment['commit']}`: "
        "32/8 heads, D 128, bf16, pages of 16 shuffled, K/V sets of at least 300 MB in turn. FA3 "
        "is vLLM's FlashAttention-3 on the same pages (it has no tree mask); the read floor is a "
        "kernel that only reads the pages. **It does not beat FlashAttention-3 yet** (see Limits)."
    )
    yield ""
    yield row("B x L", "rows", "ours us", "FA3 us", "ours / FA3", "of read floor", "tree / chain")
    yield row(*["---"] * 7)
    for result in data["results"]:
        case, us = result["case"], {k: v["median_us"] for k, v in result["timings"].items()}
        if case["section"] == "k1" and case["rows"] not in (1, 8, 16):
            continue
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


def render() -> str:
    sections = (commit_lines, cpu_commit_lines, traffic_lines, attention_lines)
    return "\n\n".join("\n".join(section()) for section in sections)


def main(arguments: list[str]) -> int:
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    marker, rest = rest.split("\n", 1)
    _, tail = rest.split(END)
    made = f"{head}{BEGIN}{marker}\n{render()}\n{END}{tail}"
    if "--check" in arguments:
        if made != text:
            print(
                "README.md does not say what benchmarks/results holds: run tools/readme_results.py"
            )
            return 1
        return 0
    readme.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
