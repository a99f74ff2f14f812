"""Whole generations: the demo's table, and the transformers host beside transformers."""

from __future__ import annotations

from collections.abc import Iterator

from .records import head, load, row

WAYS = {
    "transformers generate": "transformers' `generate`",
    "transformers prompt lookup": "transformers' prompt lookup",
    "none": "ours, no drafts",
    "ngram": "ours, n-gram",
    "eagle3": "ours, EAGLE3",
    "nwor": "NWOR alone, EAGLE3",
    "rectify": "SpecPV rectify",
    "refresh": "SpecPV refresh",
    "lossless": "SpecPV lossless",
}


def demo_lines() -> Iterator[str]:
    """What `make demo` printed when its report was recorded."""
    data = load("cpu/demo.json")
    yield f"`make demo` ends with (2 cores, aarch64, {data['seconds']:.0f} s):"
    yield ""
    yield "```"
    yield from data["table"]
    yield "```"


def cpu_lines() -> Iterator[str]:
    data = load("cpu/generate.json")
    yield (
        f"{data['device']} (aarch64), commit `{data['revision']}`: {data['model']}, "
        f"{data['dtype']}, greedy, batch 1, {data['tokens']} tokens, prompt included. All took "
        "turns in one run."
    )
    yield ""
    kinds = list(data["short"])
    yield from head("tokens per second", *kinds, *(f"tokens per step, {kind}" for kind in kinds))
    for name in data["short"][kinds[0]]:
        results = [data["short"][kind][name] for kind in kinds]
        yield row(
            WAYS[name],
            *(f"{one['tokens_per_second']:.1f}" for one in results),
            *(_step(one) for one in results),
        )
    yield ""
    yield (
        f"After a prompt of {data['context']} tokens, decoding alone, views of "
        f"{data['view_tokens']} tokens. `drift` is the share of emitted tokens that full "
        "attention would have chosen differently:"
    )
    yield ""
    yield from head("", "tokens per second", "tokens per step", "same tokens as NWOR", "drift")
    for name, one in data["long"].items():
        yield row(
            WAYS[name],
            f"{one['tokens_per_second']:.1f}",
            _step(one),
            "-" if name == "nwor" else "yes" if one["same_tokens"] else "no",
            "-" if one["drift"] is None else f"{100 * one['drift']:.1f} %",
        )


def _step(one: dict) -> str:
    return "-" if one["tokens_per_step"] is None else f"{one['tokens_per_step']:.2f}"


def gpu_lines() -> Iterator[str]:
    """Full and partial steps of the transformers host over long contexts, on a GPU."""
    data = load("h200/generate.json")
    views = next(iter(data["models"].values()))[0]["view_tokens"]
    yield (
        f"{data['device']}, commit `{data['revision']}`: random bfloat16 weights, {data['rows']} "
        f"rows and {data['accepted']} accepted drafts for every request, views of {views} tokens, "
        "passes replayed from CUDA graphs; median ms of a step. A view serves several partial "
        "steps; then a full step feeds its tail again (`refresh`). The last column is the gain "
        "over both."
    )
    yield ""
    yield from head(
        "shapes", "B x L", "full", "partial", "refresh", "full / partial", "full / mean of both"
    )
    for model, results in data["models"].items():
        for result in results:
            size = f"{result['batch']} x {result['context']}"
            ms = result.get("ms", {})
            if len(ms) < 3:
                yield row(model, size, result.get("problem") or "not run", "", "", "", "")
                continue
            yield row(
                model,
                size,
                *(f"{ms[kind]:.2f}" for kind in ("full", "partial", "full_refresh")),
                f"{result['full / partial']:.2f}",
                f"{result['full / mean with refreshes']:.2f}",
            )


def offload_lines() -> Iterator[str]:
    """Steps over a cache in host memory, beside one on the GPU."""
    data = load("h200/offload.json")
    yield (
        f"{data['device']}, commit `{data['revision']}`: random bfloat16 weights (8 layers of "
        f"llama-3.1-8b), a budget of {data['budget'] / 2**30:.0f} GiB, {data['rows']} rows and "
        f"{data['accepted']} accepted drafts for every request; ms of a step, `mean` over full and "
        "partial steps. Tokens were equal in all runs."
    )
    yield ""
    yield from head(
        *("shapes", "B x L", "K/V", "cache on", "GiB on the GPU", "full", "partial"),
        *("mean, `refresh`", "mean, `lossless`"),
    )
    for model, entry in data["models"].items():
        for result in entry["results"]:
            for side, name in (("gpu", "GPU"), ("host", "host")):
                yield row(model, *_offload_cells(result, side, name))


def _offload_cells(result: dict, side: str, name: str) -> list[str]:
    runs = result["rounds"]

    def mean(way: str, kind: str) -> str:
        return f"{sum(run[way][side]['ms'][kind] for run in runs) / len(runs):.1f}"

    return [
        f"{result['batch']} x {result['context']}",
        f"{runs[0]['full']['gpu']['gpu_bytes']['cache'] / 2**30:.1f} GiB",
        name,
        f"{sum(runs[0]['refresh'][side]['gpu_bytes'].values()) / 2**30:.1f}",
        mean("full", "full"),
        mean("refresh", "partial"),
        mean("refresh", "mean of cycles"),
        mean("lossless", "mean of cycles"),
    ]
