"""Stage and commit: times beside the engine's, and the memory traffic of both."""

from __future__ import annotations

from collections.abc import Iterator

from .records import head, load, row

PEERS = {
    "copy": "one copy kernel, same bytes",
    "vllm": "vLLM `reshape_and_cache_flash`",
    "index_put": "`index_put_`",
    "memcpy": "memcpy, same bytes",
}


def commit_lines() -> Iterator[str]:
    data = load("h200/commit.json")
    yield (
        f"Stage and commit on {data['device']}, torch {data['torch']}, commit `{data['revision']}`:"
        f" 32 layers, 8 KV heads, D 128, bf16, page 16, {data['layout']} cache, inside CUDA graphs "
        f"over rotating data, median of {data['replays']}. A commit is one launch for all layers; "
        "vLLM's figure beside it is its 32 launches."
    )
    yield ""
    yield from head("", "tokens", "ours us", "peer", "peer us", "ours / peer", "goal")
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
    yield from head("tokens", "ours us", "memcpy us", "memcpy / ours")
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
    yield from head("acceptance", "scheme", "L2 writes", "DRAM writes", "DRAM reads")
    for entry in data["ranges"]:
        traffic = entry["bytes_per_round"]
        yield row(
            f"{entry['acceptance']} %",
            schemes[entry["scheme"]],
            *(f"{traffic[name] / 1e6:.1f}" for name in ("l2_write", "dram_write", "dram_read")),
        )
