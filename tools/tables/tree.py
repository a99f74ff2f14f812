"""Draft trees."""

from __future__ import annotations

from collections.abc import Iterator

from .records import head, load, row


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
    yield from head("", "H200 us", "goal", "plain torch", "CPU us", "plain torch", "plain Python")
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
