"""The plot of real weights and real text: tokens per second relative to plain vLLM, as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from .attention_plot import STYLE
from .vllm import geometric_mean

WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 760, 120, 70, 74, 14, 14
SERIES = ("ngram", "eagle3", "streaming", "lossless")
COLOURS = {
    "ngram": ("#8c959f", "#6e7681"),
    "eagle3": ("#bc4c00", "#f0883e"),
    "streaming": ("#8250df", "#bc8cff"),
    "lossless": ("#0969da", "#58a6ff"),
}


def _style() -> str:
    light = " ".join(f".{name} {{ fill: {colours[0]}; }}" for name, colours in COLOURS.items())
    dark = " ".join(f".{name} {{ fill: {colours[1]}; }}" for name, colours in COLOURS.items())
    return f"{STYLE}  {light}\n  @media (prefers-color-scheme: dark) {{ {dark} }}\n"


def _groups(data: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Speeds by number of requests and context, then by side."""
    groups: dict[str, dict[str, list[float]]] = {}
    for cell in data["cells"]:
        found = groups.setdefault(f"{cell['requests']} x {cell['context']}", {})
        for side in SERIES:
            speed = cell["sides"].get(side, {}).get("speed")
            if speed:
                found.setdefault(side, []).append(speed)
    return {name: found for name, found in groups.items() if found}


def _parts(data: dict[str, Any]) -> Iterator[str]:
    groups = _groups(data)
    sides = [side for side in SERIES if any(side in found for found in groups.values())]
    speeds = [s for found in groups.values() for values in found.values() for s in values]
    last = int(max(speeds, default=0)) + 1
    group = len(sides) * BAR + GAP
    bottom = TOP + group * len(groups)
    title = f"Tokens per second relative to plain vLLM, {data['model']}, real text"

    def x_of(value: float) -> float:
        return LEFT + value / last * (WIDTH - LEFT - RIGHT)

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 56}" '
        f'width="{WIDTH}" height="{bottom + 56}" role="img" aria-label="{escape(title)}">'
    )
    yield f"<style>{_style()}</style>"
    yield f'<text x="12" y="24" class="title">{escape(title)}</text>'
    for place, side in enumerate(sides):
        x = 18 + 130 * place
        yield f'<rect x="{x}" y="41" width="10" height="10" class="{side}"/>'
        yield f'<text x="{x + 16}" y="50">{side}</text>'
    for value in range(last + 1):
        at, kind = x_of(value), "floor" if value == 1 else "grid"
        yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" class="{kind}"/>'
        label = "plain" if value == 1 else f"{value}x"
        middle = 'text-anchor="middle" class="faint"'
        yield f'<text x="{at:.1f}" y="{bottom + 18}" {middle}>{label}</text>'
    note = "requests x context; bars: geometric mean over prompts and temperatures; lines: range"
    yield f'<text x="12" y="{bottom + 42}" class="faint">{note}</text>'
    for number, (name, found) in enumerate(groups.items()):
        top = TOP + GAP // 2 + group * number
        middle_y = top + len(sides) * BAR // 2 + 4
        yield f'<text x="{LEFT - 12}" y="{middle_y}" text-anchor="end">{name}</text>'
        for place, side in enumerate(sides):
            if side in found:
                yield from _bar(side, name, found[side], top + place * BAR, x_of)


def _bar(side: str, name: str, speeds: list[float], y: int, x_of: Any) -> Iterator[str]:
    mean, least, most = geometric_mean(speeds), x_of(min(speeds)), x_of(max(speeds))
    tip = f"<title>{side}, {name}: {mean:.2f} ({min(speeds):.2f} to {max(speeds):.2f})</title>"
    size = f'width="{x_of(mean) - LEFT:.1f}" height="{BAR - 3}"'
    yield f'<rect x="{LEFT}" y="{y}" {size} class="{side}">{tip}</rect>'
    at = y + (BAR - 3) / 2
    yield f'<line x1="{least:.1f}" x2="{most:.1f}" y1="{at}" y2="{at}" class="floor"/>'
    yield f'<text x="{max(most, x_of(mean)) + 6:.1f}" y="{y + 10}">{mean:.2f}</text>'


def render(data: dict[str, Any]) -> str:
    """An SVG document from one result of benchmarks/vllm/real.py."""
    return "\n".join([*_parts(data), "</svg>", ""])
