"""The plot of docs/specpv.md: what partial views see of the true attention, written as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from .attention_plot import STYLE

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 430, 62, 22, 84, 46
LEAST = 0.1  # where the axis of shares begins
SERIES = {
    "oracle": ("best blocks there are (oracle)", "#59636e", "#9198a1"),
    "specpv": ("specpv: sink, retrieved, window", "#0969da", "#58a6ff"),
    "quest": ("the score quest instead", "#8250df", "#bc8cff"),
    "streaming": ("streaming: sink, last tokens", "#bc4c00", "#f0883e"),
    "sliding": ("sliding window: last tokens", "#1a7f37", "#3fb950"),
}
DASHES = {"now": "", "later": ' stroke-dasharray="5 4"'}


def _style() -> Iterator[str]:
    yield STYLE
    for scheme, (_, light, _) in SERIES.items():
        yield f"  .{scheme} {{ stroke: {light}; fill: none; stroke-width: 2; }}"
    yield "  @media (prefers-color-scheme: dark) {"
    for scheme, (_, _, dark) in SERIES.items():
        yield f"    .{scheme} {{ stroke: {dark}; }}"
    yield "  }\n"


def _parts(data: dict[str, Any]) -> Iterator[str]:
    budgets = data["budgets"]
    shares = {(r["scheme"], r["when"], r["budget"]): r["mass"] for r in data["results"]}

    def x_of(budget: int) -> float:
        """Steps of equal width: budgets double every other time."""
        return LEFT + budgets.index(budget) / (len(budgets) - 1) * (WIDTH - LEFT - RIGHT)

    def y_of(share: float) -> float:
        return TOP + (1 - max(share, LEAST)) / (1 - LEAST) * (HEIGHT - TOP - BOTTOM)

    title = (
        f"{data['model'].split('-Instruct')[0]}, {data['tokens']} tokens of War and Peace: share "
        "of the attention that a view sees"
    )
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" role="img" aria-label="{escape(title)}">'
    )
    yield "<style>" + "\n".join(_style()) + "</style>"
    yield f'<text x="12" y="24" class="title">{escape(title)}</text>'
    for i, (scheme, (name, _, _)) in enumerate(SERIES.items()):
        x, y = 16 + i % 3 * 250, 46 + i // 3 * 18
        yield f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" class="{scheme}"/>'
        yield f'<text x="{x + 28}" y="{y}">{escape(name)}</text>'
    dashed = f"dashed: {data['later']} tokens after the choice"
    yield f'<text x="{16 + 2 * 250}" y="64" class="faint">{escape(dashed)}</text>'
    for tenth in range(round(LEAST * 10), 11):
        y = y_of(tenth / 10)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        at = f'x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" class="faint"'
        yield f"<text {at}>{tenth * 10} %</text>"
    for budget in budgets:
        at = f'x="{x_of(budget):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle"'
        yield f'<text {at} class="faint">{budget}</text>'
    yield f'<text x="{LEFT}" y="{HEIGHT - 8}" class="faint">tokens that the view shows</text>'
    for scheme in SERIES:
        for when, dash in DASHES.items():
            points = [(b, shares[scheme, when, b]) for b in budgets]
            # Below the axis a line would run along its edge: such points are left out.
            seen = [(b, share) for b, share in points if share >= LEAST]
            line = " ".join(f"{x_of(b):.1f},{y_of(share):.1f}" for b, share in seen)
            tip = f"{SERIES[scheme][0]}, {when}: " + ", ".join(
                f"{b} tokens {100 * share:.1f} %" for b, share in points
            )
            yield (
                f'<polyline points="{line}" class="{scheme}"{dash}>'
                f"<title>{escape(tip)}</title></polyline>"
            )
    yield "</svg>"


def render(data: dict[str, Any]) -> str:
    return "\n".join(_parts(data)) + "\n"
