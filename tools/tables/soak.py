"""Servers under traffic of every kind, as benchmarks/vllm/soak.py has written it down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .records import RESULTS, head, load, row

FILES = ("cpu/soak.json", "h200/soak.json")


def soak_lines() -> Iterator[str]:
    found = [load(name) for name in FILES if (RESULTS / name).exists()]
    if found:
        yield from result_lines(found)
    else:
        yield "No run of `benchmarks/vllm/soak.py` is recorded."


def result_lines(found: list[dict[str, Any]]) -> Iterator[str]:
    """A column for each run."""
    yield from head("", *(f"{data['device']}, {data['dtype']}" for data in found))
    columns = [dict(_column(data)) for data in found]
    for name in columns[0]:
        yield row(name, *(column[name] for column in columns))


def _column(data: dict[str, Any]) -> Iterator[tuple[str, str]]:
    kinds, own, vllm = data["requests"], data["counters"], data["vllm_counters"]
    yield "vLLM, commit", f"{data['vllm']}, `{data['commit']}`"
    yield "model", data["model"] + ("" if data["plugin"] else ", without the plugin")
    yield "minutes", f"{data['minutes']:g}"
    told = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()) if kind != "last")
    yield "requests", f"{sum(kinds.values()) - kinds.get('last', 0)}: {told}"
    yield "tokens", str(data["tokens"])
    yield "preemptions", f"{vllm['num_preemptions']:.0f}"
    yield "prompt tokens found in the prefix cache", f"{vllm['prefix_cache_hits']:.0f}"
    parts = (own.get(name, 0) for name in ("staged", "committed", "rejected", "failed"))
    yield (
        "staged = committed + rejected + failed",
        "{:.0f} = {:.0f} + {:.0f} + {:.0f}".format(*parts),
    )
    yield "texts of requests that came again", f"{data['repeated']}, {data['different']} different"
    yield "MiB at the end (growth after warming up)", "; ".join(_growth(data["memory_mib"]))
    wrong = " ".join("; ".join(data["problems"]).split()).replace("|", "/")
    yield "wrong", wrong or "nothing"


def _growth(sizes: dict[str, dict[str, float]]) -> Iterator[str]:
    for name, told in sizes.items():
        yield f"{name} {told['last']:.0f} ({told.get('grown', 0.0):+.1f})"
