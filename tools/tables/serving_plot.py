"""The plot of servers under traffic: throughput and times from low rates to all at once, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .attention_plot import STYLE

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 760, 330, 62, 16, 84, 58, 74
COLOURS = {
    "plain": ("#8250df", "#bc8cff"),
    "stock": ("#8c959f", "#6e7681"),
    "nwor": ("#0969da", "#58a6ff"),
    "long": ("#bc4c00", "#f0883e"),
}
SIDES = tuple(COLOURS)
ALL = "all"
# Title of a panel, and its value of a side.
PANELS: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
    ("tokens a second", lambda side: side["tokens_per_s"]),
    ("ms per token, p99", lambda side: side["token_ms"]["p99"]),
)
LINES = 4  # of the grid, besides the one at 0


def _style() -> str:
    light, dark = (
        " ".join(
            f".{side} {{ stroke: {pair[mode]}; fill: none; stroke-width: 2; }}"
            f" .{side}-dot {{ fill: {pair[mode]}; }}"
            for side, pair in COLOURS.items()
        )
        for mode in (0, 1)
    )
    return f"{STYLE}  {light}\n  @media (prefers-color-scheme: dark) {{ {dark} }}\n"


@dataclass(frozen=True)
class Place:
    """A load on the axis: rates in their order, then all at once."""

    name: str
    label: str
    sides: Mapping[str, dict[str, Any]]


def _places(data: dict[str, Any]) -> list[Place]:
    """Loads of clients that wait have no rate: they are in the table alone."""
    rates = [load for load in data["loads"] if load.get("offered_per_s")]
    rates.sort(key=lambda load: load["offered_per_s"])
    told = [Place(one["load"], f"{one['offered_per_s']:.3g}/s", one["sides"]) for one in rates]
    last = [Place(ALL, ALL, one["sides"]) for one in data["loads"] if one["load"] == ALL]
    return told + last


def _nice(value: float) -> float:
    """The next number above that is easy to read in fourths."""
    size = 10.0 ** len(str(int(value)))
    return next((size * part for part in (0.12, 0.2, 0.4, 0.8) if size * part >= value), size)


def _panel(
    number: int, places: Sequence[Place], title: str, value_of: Callable[[dict[str, Any]], float]
) -> Iterator[str]:  # fmt: skip
    width = (WIDTH - LEFT - RIGHT - BETWEEN) / len(PANELS)
    left = LEFT + number * (width + BETWEEN)
    every = [value_of(side) for place in places for side in place.sides.values()]
    most = _nice(max(every, default=1.0))

    def x_of(index: int) -> float:
        return left + (index + 0.5) / len(places) * width

    def y_of(value: float) -> float:
        return TOP + (1 - value / most) * (HEIGHT - TOP - BOTTOM)

    yield f'<text x="{left:.1f}" y="{TOP - 12}" class="faint">{escape(title)}</text>'
    for step in range(LINES + 1):
        value = most * step / LINES
        y = y_of(value)
        ends = f'x1="{left:.1f}" x2="{left + width:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
        yield f'<line {ends} class="grid"/>'
        at = f'x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end" class="faint"'
        yield f"<text {at}>{value:g}</text>"
    for index, place in enumerate(places):
        at = f'x="{x_of(index):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" class="faint"'
        yield f"<text {at}>{escape(place.label)}</text>"
    for side in SIDES:
        own = [
            (x_of(index), value_of(place.sides[side]), place)
            for index, place in enumerate(places)
            if side in place.sides
        ]
        line = " ".join(f"{x:.1f},{y_of(value):.1f}" for x, value, _ in own)
        if own:
            yield f'<polyline points="{line}" class="{side}"/>'
        for x, value, place in own:
            tip = f"<title>{side}, {escape(place.name)} ({place.label}): {value:.1f}</title>"
            at = f'cx="{x:.1f}" cy="{y_of(value):.1f}"'
            yield f'<circle {at} r="3.5" class="{side}-dot">{tip}</circle>'


def title_of(data: dict[str, Any]) -> str:
    return f"vLLM under traffic: {data['model']}, lengths {data['lengths']!r}, {data['device']}"


def render(data: dict[str, Any]) -> str:
    """An SVG document from one result of benchmarks/vllm/serving.py."""
    places, title = _places(data), title_of(data)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<style>{_style()}</style>",
        f'<text x="12" y="24" class="title">{escape(title)}</text>',
    ]
    drawn = [side for side in SIDES if any(side in place.sides for place in places)]
    for number, side in enumerate(drawn):
        x = 18 + 110 * number
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="46" y2="46" class="{side}"/>')
        parts.append(f'<text x="{x + 28}" y="50">{side}</text>')
    for number, (name, value_of) in enumerate(PANELS):
        parts += _panel(number, places, name, value_of)
    note = "requests a second, at random moments; all: at once"
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 14}" class="faint">{note}</text>')
    return "\n".join([*parts, "</svg>", ""])
