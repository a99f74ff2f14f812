"""Small charts as inline SVG. Every number that is drawn is also written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

WIDTH = 640
_LABEL, _VALUE = 190, 110
_PALETTE = ("#4269d0", "#efb118", "#3ca951", "#ff725c", "#a463f2", "#9c6b4e", "#6cc5b0", "#97bbf5")

# What a view consists of, and its color.
SEGMENTS = {"sink": "#ff725c", "retrieved": "#3ca951", "window": "#4269d0", "tail": "#efb118"}


def color(index: int) -> str:
    """The color of the index-th run, in every chart."""
    return _PALETTE[index % len(_PALETTE)]


def bars(rows: Sequence[tuple[str, float, str, str]]) -> str:
    """Horizontal bars: (label, value, how the value is written, color)."""
    most = max((value for _, value, _, _ in rows), default=0) or 1
    room = WIDTH - _LABEL - _VALUE
    parts = []
    for index, (label, value, text, paint) in enumerate(rows):
        y = 28 * index
        width = room * value / most
        parts.append(
            f'<text x="{_LABEL - 8}" y="{y + 17}" text-anchor="end">{escape(label)}</text>'
            f'<rect x="{_LABEL}" y="{y + 4}" width="{width:.1f}" height="18" fill="{paint}"/>'
            f'<text x="{_LABEL + width + 6:.1f}" y="{y + 17}">{escape(text)}</text>'
        )
    return _svg("".join(parts), 28 * len(rows))


def stacked(rows: Sequence[tuple[str, float, float, str]]) -> str:
    """Horizontal bars of two parts: (label, first, second, how both are written)."""
    most = max((first + second for _, first, second, _ in rows), default=0) or 1
    room = WIDTH - _LABEL - _VALUE - 90
    parts = []
    for index, (label, first, second, text) in enumerate(rows):
        y = 28 * index
        a, b = room * first / most, room * second / most
        parts.append(
            f'<text x="{_LABEL - 8}" y="{y + 17}" text-anchor="end">{escape(label)}</text>'
            f'<rect x="{_LABEL}" y="{y + 4}" width="{a:.1f}" height="18" fill="{_PALETTE[3]}"/>'
            f'<rect x="{_LABEL + a:.1f}" y="{y + 4}" width="{b:.1f}" height="18" '
            f'fill="{_PALETTE[2]}"/>'
            f'<text x="{_LABEL + a + b + 6:.1f}" y="{y + 17}">{escape(text)}</text>'
        )
    return _svg("".join(parts), 28 * len(rows))


def histogram(counts: dict[int, int], paint: str) -> str:
    """Columns by a whole number, with each column's share."""
    total = sum(counts.values()) or 1
    lengths = range(max(counts, default=0) + 1)
    most = max(counts.values(), default=0) or 1
    width = min(56.0, 300.0 / len(lengths))
    parts = []
    for length in lengths:
        count = counts.get(length, 0)
        height = 90 * count / most
        x = 10 + width * length
        parts.append(
            f'<rect x="{x:.1f}" y="{110 - height:.1f}" width="{width - 4:.1f}" '
            f'height="{height:.1f}" fill="{paint}"><title>{count} steps</title></rect>'
            f'<text x="{x + width / 2 - 2:.1f}" y="126" text-anchor="middle">{length}</text>'
        )
        if count:
            parts.append(
                f'<text x="{x + width / 2 - 2:.1f}" y="{106 - height:.1f}" text-anchor="middle" '
                f'class="small">{100 * count / total:.0f}%</text>'
            )
    return _svg("".join(parts), 132, 320)


def lines(
    series: Sequence[tuple[str, Sequence[tuple[float, float]], str]],
    x_title: str,
    y_title: str,
    *,
    x_from_zero: bool = False,
) -> str:
    """Curves over a common grid, each with its name."""
    points = [point for _, own, _ in series for point in own]
    if not points:
        return ""
    xs = [x for x, _ in points]
    low, high = (0.0 if x_from_zero else min(xs)), max(xs)
    high = high if high > low else low + 1
    top = _round_up(max(y for _, y in points) or 1.0)
    left, right, height = 70, WIDTH - 150, 190

    def place(x: float, y: float) -> tuple[float, float]:
        return left + (right - left) * (x - low) / (high - low), height - (height - 16) * y / top

    parts = []
    for fraction in (0, 0.5, 1):
        y = place(low, top * fraction)[1]
        parts.append(
            f'<line x1="{left}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="grid"/>'
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end" class="small">'
            f"{_number(top * fraction)}</text>"
        )
    for x in (low, high):
        parts.append(
            f'<text x="{place(x, 0)[0]:.1f}" y="{height + 16}" text-anchor="middle" class="small">'
            f"{_number(x)}</text>"
        )
    for name, own, paint in series:
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in own)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{paint}" stroke-width="2"/>')
        if own:
            x, y = place(*own[-1])
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{paint}"/>'
                f'<text x="{x + 8:.1f}" y="{y + 4:.1f}">{escape(name)}</text>'
            )
    middle = (left + right) / 2
    parts.append(
        f'<text x="{middle}" y="{height + 32}" text-anchor="middle" class="small">'
        f'{escape(x_title)}</text><text x="4" y="10" class="small">{escape(y_title)}</text>'
    )
    return _svg("".join(parts), height + 38)


def views(rows: Sequence[dict[str, Any]]) -> str:
    """Strips of the context, one for each view of a ViewLog: what is read has a color."""
    longest = max(view["context"] for view in rows)
    scale = (WIDTH - _LABEL) / longest

    def piece(y: float, begin: float, end: float, paint: str, opacity: float = 1.0) -> str:
        shade = f' fill-opacity="{opacity:.2f}"' if opacity < 1 else ""
        return (
            f'<rect x="{_LABEL + scale * begin:.1f}" y="{y}" '
            f'width="{max(1.0, scale * (end - begin)):.1f}" height="12" fill="{paint}"{shade}/>'
        )

    parts = []
    for index, (name, paint) in enumerate(SEGMENTS.items()):
        x = _LABEL + 110 * index
        parts.append(f'<rect x="{x}" y="2" width="12" height="12" fill="{paint}"/>')
        parts.append(f'<text x="{x + 18}" y="12" class="small">{name}</text>')
    for index, view in enumerate(rows):
        y = 22 + 16 * index
        seen = sum(heads for _, heads in view["chosen"]) * view["block"] / view["heads"]
        seen += view["sink"] + view["context"] - view["window"]
        parts.append(
            f'<text x="{_LABEL - 8}" y="{y + 10}" text-anchor="end" class="small">'
            f"{seen:,.0f} of {view['context']:,} tokens</text>"
        )
        parts.append(piece(y, 0, view["context"], "var(--line)"))
        parts.append(piece(y, 0, view["sink"], SEGMENTS["sink"]))
        for block, heads in view["chosen"]:
            begin = block * view["block"]
            share = heads / view["heads"]
            parts.append(piece(y, begin, begin + view["block"], SEGMENTS["retrieved"], share))
        parts.append(piece(y, view["window"], view["tail"], SEGMENTS["window"]))
        parts.append(piece(y, view["tail"], view["context"], SEGMENTS["tail"]))
    return _svg("".join(parts), 24 + 16 * len(rows))


def _round_up(value: float) -> float:
    size = 10 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 1.5, 2, 3, 5, 10) if step * size >= value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.3g}"


def _svg(inner: str, height: float, width: float = WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" '
        f'role="img">{inner}</svg>'
    )
