"""The plot of servers under traffic: throughput and times over the rate of requests, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from typing import Any

from .attention_plot import STYLE
from .serving import SIDES

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM, BETWEEN = 760, 330, 62, 16, 84, 58, 74
COLOURS = {
    "stock": ("#8c959f", "#6e7681"),
    "nwor": ("#0969da", "#58a6ff"),
    "long": ("#bc4c00", "#f0883e"),
}
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


def _points(data: dict[str, Any]) -> dict[str, list[tuple[float, dict[str, Any]]]]:
    """By side: requests a second that were offered, and what was measured."""
    found: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for load in data["loads"]:
        if load.get("offered_per_s"):
            for side in SIDES:
                if side in load["sides"]:
                    point = (load["offered_per_s"], load["sides"][side])
                    found.setdefault(side, []).append(point)
    return {side: sorted(points, key=lambda point: point[0]) for side, points in found.items()}


def _nice(value: float) -> float:
    """The next number above that is easy to read in fourths."""
    size = 10.0 ** len(str(int(value)))
    return next((size * part for part in (0.12, 0.2, 0.4, 0.8) if size * part >= value), size)


def _panel(
    number: int, points: dict[str, list[tuple[float, dict[str, Any]]]], title: str,
    value_of: Callable[[dict[str, Any]], float],
) -> Iterator[str]:  # fmt: skip
    width = (WIDTH - LEFT - RIGHT - BETWEEN) / len(PANELS)
    left = LEFT + number * (width + BETWEEN)
    every = [point for own in points.values() for point in own]
    last_x = max((rate for rate, _ in every), default=1.0)
    last_y = _nice(max((value_of(side) for _, side in every), default=1.0))

    def x_of(rate: float) -> float:
        return left + rate / last_x * width

    def y_of(value: float) -> float:
        return TOP + (1 - value / last_y) * (HEIGHT - TOP - BOTTOM)

    yield f'<text x="{left:.1f}" y="{TOP - 12}" class="faint">{escape(title)}</text>'
    for step in range(LINES + 1):
        value = last_y * step / LINES
        y = y_of(value)
        ends = f'x1="{left:.1f}" x2="{left + width:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
        yield f'<line {ends} class="grid"/>'
        at = f'x="{left - 8:.1f}" y="{y + 4:.1f}" text-anchor="end" class="faint"'
        yield f"<text {at}>{value:g}</text>"
    for rate in sorted({rate for rate, _ in every}):
        at = f'x="{x_of(rate):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" class="faint"'
        yield f"<text {at}>{rate:.3g}</text>"
    for side, own in points.items():
        line = " ".join(f"{x_of(rate):.1f},{y_of(value_of(told)):.1f}" for rate, told in own)
        yield f'<polyline points="{line}" class="{side}"/>'
        for rate, told in own:
            tip = f"<title>{side}, {rate:.3g} requests/s: {value_of(told):.1f}</title>"
            at = f'cx="{x_of(rate):.1f}" cy="{y_of(value_of(told)):.1f}"'
            yield f'<circle {at} r="3.5" class="{side}-dot">{tip}</circle>'


def render(data: dict[str, Any]) -> str:
    """An SVG document from one result of benchmarks/vllm/serving.py."""
    points = _points(data)
    title = f"vLLM under traffic: {data['model']}, lengths {data['lengths']!r}, {data['device']}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="{escape(title)}">',
        f"<style>{_style()}</style>",
        f'<text x="12" y="24" class="title">{escape(title)}</text>',
    ]
    for place, side in enumerate(points):
        x = 18 + 110 * place
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="46" y2="46" class="{side}"/>')
        parts.append(f'<text x="{x + 28}" y="50">{side}</text>')
    for number, (name, value_of) in enumerate(PANELS):
        parts += _panel(number, points, name, value_of)
    note = f'<text x="{LEFT}" y="{HEIGHT - 14}" class="faint">requests a second, at random moments'
    return "\n".join([*parts, note + "</text>", "</svg>", ""])
