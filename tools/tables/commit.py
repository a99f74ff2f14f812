"""Stage and commit: times beside vLLM's, and the memory traffic of both."""

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
        f"{data['device']}, torch {data['torch']}, commit `{data['revision']}`: 32 layers, 8 KV "
        f"heads, D 128, bf16, page 16, {data['layout']} cache, inside CUDA graphs over rotating "
        f"data, median of {data['replays']}. A commit is one launch for all layers; vLLM's write "
        "is 32 launches, one for each layer. `stage` is one layer."
    )
    yield ""
    yield from head("", "tokens", "ours us", "peer", "peer us", "ours / peer")
    for result in data["results"]:
        ours = result["what"]
        for peer in ("vllm", "copy"):
            if peer not in result["us"]:
                continue
            ratio = result["us"][ours] / result["us"][peer]
            yield row(
                ours,
                result["tokens"],
                f"{result['us'][ours]:.2f}",
                PEERS[peer],
                f"{result['us'][peer]:.2f}",
                f"{ratio:.2f}",
            )


def cpu_commit_lines() -> Iterator[str]:
    data = load("cpu/commit.json")
    yield (
        f"{data['device']} (aarch64), commit `{data['revision']}`, the same shapes: a commit, and "
        "one memcpy of the same bytes."
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
        f"Nsight Compute, commit `{data['revision']}`: {data['requests']} requests of 1 + "
        f"{data['drafts']} rows, {megabytes:.1f} MB of K/V in a round; MB per round. `engine` "
        "writes every row to the cache. `nwor` is all that staging and commit do; `nwor, cache` is "
        "the part that goes to the paged cache. **Cache writes fall with the rejected share. Total "
        "traffic does not: accepted rows are moved twice.**"
    )
    yield ""
    schemes = {"engine": "engine", "nwor": "nwor", "nwor, cache only": "nwor, cache"}
    yield from head("acceptance", "scheme", "L2 writes", "DRAM writes", "DRAM reads")
    for entry in data["ranges"]:
        traffic = entry["bytes_per_round"]
        yield row(
            f"{entry['acceptance']} %",
            schemes[entry["scheme"]],
            *(f"{traffic[name] / 1e6:.1f}" for name in ("l2_write", "dram_write", "dram_read")),
        )
