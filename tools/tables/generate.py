"""The README's parts about whole generations: the demo's table, and ours beside transformers'."""

from __future__ import annotations

from collections.abc import Iterator

from .records import find, head, row

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
    data = find("cpu/demo.json")
    if data is None:
        return
    yield f"`make demo` ends with (2 cores, aarch64, {data['seconds']:.0f} s):"
    yield ""
    yield "```"
    yield from data["table"]
    yield "```"


def generate_lines() -> Iterator[str]:
    data = find("cpu/generate.json")
    if data is None:
        return
    yield (
        f"Whole generations on the CPU, {data['device'].split(', ')[1]} (aarch64), commit "
        f"`{data['revision']}`: {data['model']}, {data['dtype']}, greedy, batch 1, "
        f"{data['tokens']} tokens, prompt included, all in turn in one run"
        + (f" ({data['note']})" if data.get("note") else "")
        + "."
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
    if data["long"]:
        yield (
            f"After {data['context']} tokens, decoding alone, views of {data['view_tokens']} "
            "tokens:"
        )
        yield ""
        yield from head("", "tokens per second", "tokens per step", "NWOR's tokens", "drift")
        for name, one in data["long"].items():
            yield row(
                WAYS[name],
                f"{one['tokens_per_second']:.1f}",
                _step(one),
                "-" if name == "nwor" else "yes" if one["same_tokens"] else "no",
                "-" if one["drift"] is None else f"{100 * one['drift']:.1f} %",
            )
        yield ""
    yield from head("ratio", "goal", *data["ratios"])
    for name, goal in data["goals"].items():
        values = [own.get(name) for own in data["ratios"].values()]
        yield row(name, goal, *("-" if v is None else f"{v:.2f}" for v in values))


def _step(one: dict) -> str:
    return "-" if one["tokens_per_step"] is None else f"{one['tokens_per_step']:.2f}"


def gpu_lines() -> Iterator[str]:
    """Full and partial steps of the transformers host over long contexts, on a GPU."""
    data = find("h200/generate.json")
    if data is None:
        return
    views = next(iter(data["models"].values()))[0]["view_tokens"]
    yield (
        f"Steps of the transformers host on {data['device']}, commit `{data['revision']}`: random "
        f"bfloat16 weights, {data['rows']} rows and {data['accepted']} accepted drafts for every "
        f"request, views of {views} tokens, passes replayed from CUDA graphs; median ms from the "
        "batch's lists to the commit's receipt. A view lives for some partial steps, then a full "
        "step feeds its tail again: `with refreshes` is the mean over both."
        + (f" Note: {data['note']}." if data.get("note") else "")
    )
    yield ""
    yield from head(
        "shapes", "B x L", "full", "partial", "refresh", "full / partial", "with refreshes"
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
    yield ""
    yield f"Goal at 8 x 32768: a full step takes at least {data['goal at 8 x 32768']} partial ones."
