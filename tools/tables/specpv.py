"""Retrieval and partial verification."""

from __future__ import annotations

from collections.abc import Iterator

from .records import head, load, row


def retrieval_lines() -> Iterator[str]:
    cuda, cpu = load("h200/retrieval.json"), load("cpu/retrieval.json")
    yield (
        f"Partial verification, one request and layer, 8 rows: a refresh (scores, choice, view of "
        f"256 blocks) and a full build of the block summaries, on {cuda['device']} (32/8 heads, "
        f"D 128, bf16, commit `{cuda['revision']}`, inside CUDA graphs) and on the "
        f"{cpu['device']} (aarch64, D 64, float32, commit `{cpu['revision']}`). The peer is "
        "einsum, topk and take_along_dim in torch, which copies the chosen tokens, as it is and "
        "by torch.compile."
    )
    yield ""
    yield from head(
        "", "tokens", "score", "ours us", "torch us", "compiled us", "torch / ours", "goal"
    )
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
            faster = us.get("compiled")
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
    served = load("h200/retrieval_commits.json")
    commits = [r for r in served["results"] if r["what"] == "commit"]
    if steps:
        yield ""
        yield (
            "Attention of a verify step of 32 layers, 8 requests of 8 rows, over everything and "
            "over views of 4256 tokens (with what makes the views and the plan):"
        )
        yield ""
        yield from head("context", "full us", "partial us", "full / partial", "goal")
        for result in steps:
            yield row(
                f"{result['requests']} x {result['tokens']}",
                f"{result['us']['full']:.0f}",
                f"{result['us']['partial']:.0f}",
                f"{result['speedup']:.1f}",
                f">= {result['goal'].rpartition(' ')[2]}" if result["goal"] else "",
            )
    if commits:
        yield ""
        yield (
            "A commit of 32 layers with 4 accepted rows for each request, commit "
            f"`{served['revision']}`: alone, and with compact views to feed; one process, others "
            "differ by up to 10 % of `alone`:"
        )
        yield ""
        yield from head("requests", "alone us", "compact views us", "more")
        for result in commits:
            us = result["us"]
            more = f"{(result['relative']['compact views'] - 1) * 100:+.1f} %"
            yield row(result["requests"], f"{us['alone']:.1f}", f"{us['compact views']:.1f}", more)
