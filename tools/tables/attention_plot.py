"""The plot of verify attention, written as SVG by hand: no plotting library needed.

Colours follow the reader's light or dark mode, the background stays whatever the page has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 190, 24, 74, 26
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328; }
  .title { font-weight: 600; font-size: 14px; }
  .faint { fill: #59636e; }
  .grid { stroke: #d1d9e0; }
  .floor { stroke: #59636e; stroke-width: 1.5; }
  .s0 { fill: #0969da; } .s1 { fill: #bc4c00; } .s2 { fill: #8250df; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .faint { fill: #9198a1; }
    .grid { stroke: #3d444d; }
    .floor { stroke: #9198a1; }
    .s0 { fill: #58a6ff; } .s1 { fill: #f0883e; } .s2 { fill: #bc8cff; }
  }
"""


@dataclass(frozen=True)
class Line:
    """One shape: its name and, per series, the time as a multiple of the read floor."""

    name: str
    values: tuple[float | None, ...]


def _marker(series: int, x: float, y: float, tip: str) -> str:
    """Series differ in shape too, for those who do not tell the colours apart."""
    shape = (
        f'<circle cx="{x:.1f}" cy="{y}" r="6" class="s0">',
        f'<rect x="{x - 5:.1f}" y="{y - 5}" width="10" height="10" class="s1">',
        f'<path d="M{x:.1f} {y - 7}l7 7l-7 7l-7-7z" class="s2">',
    )[series]
    return f"{shape}<title>{escape(tip)}</title></{shape[1 : shape.index(' ')]}>"


def _parts(title: str, series: Sequence[str], lines: Sequence[Line]) -> Iterator[str]:
    height = TOP + ROW * len(lines) + 40
    largest = max(v for line in lines for v in line.values if v is not None)
    last = max(2.0, -(-largest // 0.5) * 0.5)

    def x_of(value: float) -> float:
        return LEFT + (value - 1) / (last - 1) * (WIDTH - LEFT - RIGHT)

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
        f' height="{height}" role="img" aria-label="{escape(title)}">'
    )
    yield f"<style>{STYLE}</style>"
    yield f'<text x="12" y="24" class="title">{escape(title)}</text>'
    x = 18
    for i, name in enumerate(series):
        yield _marker(i, x, 46, name)
        yield f'<text x="{x + 12}" y="50">{escape(name)}</text>'
        x += 40 + 7 * len(name)
    bottom = TOP + ROW * len(lines)
    steps = round((last - 1) / 0.5)
    for i in range(steps + 1):
        value = 1 + i * 0.5
        kind = "floor" if i == 0 else "grid"
        at = x_of(value)
        yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" class="{kind}"/>'
        label = "read floor" if i == 0 else f"{value:g}x"
        middle = 'text-anchor="middle" class="faint"'
        yield f'<text x="{at:.1f}" y="{bottom + 18}" {middle}>{label}</text>'
    for i, line in enumerate(lines):
        y = TOP + ROW * i + ROW // 2
        yield f'<text x="{LEFT - 16}" y="{y + 4}" text-anchor="end">{escape(line.name)}</text>'
        # Ours last: on top where markers meet.
        for s in reversed(range(len(line.values))):
            value = line.values[s]
            if value is not None:
                yield _marker(s, x_of(value), y, f"{series[s]}: {value:.2f} times the read floor")
    yield "</svg>"


def render(title: str, series: Sequence[str], lines: Sequence[Line]) -> str:
    """An SVG document: a line per shape, a marker per series, time relative to the read floor."""
    return "\n".join(_parts(title, series, lines)) + "\n"
