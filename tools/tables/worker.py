"""A remote drafter beside local decoding."""

from __future__ import annotations

from collections.abc import Iterator

from .records import head, load, row


def worker_lines() -> Iterator[str]:
    data = load("cpu/worker_remote.json")
    yield (
        f"{data['machine']['device']} ({data['machine']['processor']}): "
        f"{data['model']}, {data['dtype']}, greedy, "
        f"{data['prompts']} prompts one at a time, "
        f"{data['new_tokens']} new tokens each. Latency is simulated, there and back. All took "
        "turns in one run and wrote the same tokens. Load average of other work before the run: "
        f"{data['load_average']:.1f}."
    )
    yield ""
    yield from head("", "tokens per second", "to local, no drafts", "tokens per call")
    for one in data["ways"]:
        yield row(
            one["way"],
            f"{one['tokens_per_second']:.1f}",
            f"{one['ratio_to_first']:.2f}",
            f"{one['tokens_per_call']:.2f}",
        )
