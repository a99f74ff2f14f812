"""Retrieval and partial verification."""

from __future__ import annotations

from collections.abc import Iterator

from .records import head, load, row


def retrieval_lines() -> Iterator[str]:
    cuda, cpu = load("h200/retrieval.json"), load("cpu/retrieval.json")
    yield (
        "One request and layer, 8 rows: a refresh (scores, choice, view of 256 blocks) and a full "
        f"build of the block summaries. {cuda['device']}: 32/8 heads, D 128, bf16, commit "
        f"`{cuda['revision']}`, inside CUDA graphs. {cpu['device']}: aarch64, D 64, float32, "
        f"commit `{cpu['revision']}`. The peer is einsum, topk and take_along_dim in torch, which "
        "copies the chosen tokens, plain and by torch.compile."
    )
    yield ""
    yield from head("", "tokens", "score", "ours us", "torch us", "compiled us", "torch / ours")
    for data, kind in ((cuda, "H200"), (cpu, "CPU")):
        for result in data["results"]:
            if result["what"] not in ("refresh", "summaries"):
                continue
            score = result["case"].rsplit(", ", 1)[1]
            if result["what"] == "summaries" and score == "quest":
                continue  # the same work again
            us = result["us"]
            compiled = us.get("compiled")
            yield row(
                f"{result['what']}, {kind}",
                result["tokens"],
                score if result["what"] == "refresh" else "",
                f"{us['ours']:.1f}",
                f"{us['torch']:.1f}",
                "" if compiled is None else f"{compiled:.1f}",
                f"{result['speedup']:.1f}",
            )


def view_lines() -> Iterator[str]:
    data = load("h200/retrieval.json")
    yield (
        f"{data['device']}, commit `{data['revision']}`: attention of 32 layers for 8 requests of "
        "8 rows, over everything and over views of 4256 tokens. `partial` includes building the "
        "views and the plan."
    )
    yield ""
    yield from head("B x L", "full us", "partial us", "full / partial")
    for result in data["results"]:
        if result["what"] != "step":
            continue
        yield row(
            f"{result['requests']} x {result['tokens']}",
            f"{result['us']['full']:.0f}",
            f"{result['us']['partial']:.0f}",
            f"{result['speedup']:.1f}",
        )


def compact_commit_lines() -> Iterator[str]:
    data = load("h200/retrieval_commits.json")
    yield (
        f"{data['device']}, commit `{data['revision']}`: a commit of 32 layers with 4 accepted "
        "rows for each request, alone and with compact views to update. Processes differ by up to "
        "10 %."
    )
    yield ""
    yield from head("requests", "alone us", "with compact views us", "ratio")
    for result in data["results"]:
        us = result["us"]
        alone, compact = us["alone"], us["compact views"]
        yield row(result["requests"], f"{alone:.1f}", f"{compact:.1f}", f"{compact / alone:.2f}")
