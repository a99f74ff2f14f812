"""Verify attention on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

from .records import head, load, row


def cpu_attention_lines() -> Iterator[str]:
    data = load("cpu/attention.json")
    yield (
        f"{data['device']} (aarch64), commit `{data['revision']}`: the time of torch's SDPA with a "
        "boolean mask, divided by ours. SDPA reads contiguous K/V, whose gathering is not counted."
    )
    yield ""
    by_shape: dict[tuple[str, str, str, str], dict[int, float]] = {}
    for result in data["results"]:
        size, _, heads, dim, dtype = result["case"].split("  ")
        shape = (dtype, heads, dim, size)
        by_shape.setdefault(shape, {})[result["rows"]] = 1 / result["ratio"]["SDPA"]
    rows = sorted({count for ratios in by_shape.values() for count in ratios})
    yield from head("", *(f"{count} row{'s' * (count > 1)}" for count in rows))
    for shape, ratios in by_shape.items():
        yield row(", ".join(shape), *(f"{ratios[count]:.1f}" for count in rows))
