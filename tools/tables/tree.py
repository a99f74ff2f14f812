"""Draft trees."""

from __future__ import annotations

from collections.abc import Iterator

from .records import head, load, row


def tree_lines() -> Iterator[str]:
    cuda, cpu = load("h200/tree.json"), load("cpu/tree.json")
    shape = cuda["shape"]
    yield (
        f"{cuda['device']}, commit `{cuda['revision']}`: {shape['requests']} requests, "
        f"{shape['rows']} rows, top-k {shape['best']}, {shape['steps']} steps, vocabulary "
        f"{shape['vocabulary']}, inside CUDA graphs, median of {cuda['replays']}. {cpu['device']} "
        f"(aarch64), commit `{cpu['revision']}`: vocabulary {cpu['shape']['vocabulary']}. Reading "
        f"all target probabilities once takes {tree_us(cuda, 'sampling')['read_all']:.0f} us on "
        "the H200; sampling reads only the rows on its walk."
    )
    yield ""
    yield from head(
        "us", "H200", "H200, plain torch", "CPU", "CPU, plain torch", "CPU, plain Python"
    )
    labels = {"build": "`tree_from_topk`", "greedy": "`accept_greedy`"}
    labels["sampling"] = "`accept_sampling`"
    for what, label in labels.items():
        fast, slow = tree_us(cuda, what), tree_us(cpu, what)
        yield row(
            label,
            f"{fast['ours']:.1f}",
            f"{fast['torch']:.0f}",
            *(f"{slow[name]:.0f}" for name in ("ours", "torch", "python")),
        )


def tree_us(data: dict, what: str) -> dict[str, float]:
    return next(one["us"] for one in data["results"] if one["what"] == what)
