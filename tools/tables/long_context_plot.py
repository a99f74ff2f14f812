"""The plot of long contexts in vLLM: tokens per second relative to stock vLLM, as SVG."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from .attention_plot import STYLE

WIDTH, LEFT, RIGHT, TOP, BAR, GAP = 760, 120, 70, 74, 16, 14
SERIES = (("lossless", "s0"), ("refresh", "s1"))


def _parts(data: dict) -> Iterator[str]:
    cells = {name: cell["speed"] for name, cell in data["cells"].items()}
    most = max(speed for speeds in cells.values() for speed in speeds.values())
    last = int(most) + 1
    group = len(SERIES) * BAR + GAP
    bottom = TOP + group * len(cells)
    title = "Tokens per second with long contexts, relative to stock vLLM with the same EAGLE3 head"

    def x_of(value: float) -> float:
        return LEFT + value / last * (WIDTH - LEFT - RIGHT)

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 36}" '
        f'width="{WIDTH}" height="{bottom + 36}" role="img" aria-label="{escape(title)}">'
    )
    yield f"<style>{STYLE}</style>"
    yield f'<text x="12" y="24" class="title">{escape(title)}</text>'
    legend = (("lossless: the output of full attention", 18), ("refresh: not lossless", 330))
    for (_, kind), (name, x) in zip(SERIES, legend, strict=True):
        yield f'<rect x="{x}" y="41" width="10" height="10" class="{kind}"/>'
        yield f'<text x="{x + 16}" y="50">{escape(name)}</text>'
    for value in range(last + 1):
        at, kind = x_of(value), "floor" if value == 1 else "grid"
        yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" class="{kind}"/>'
        label = "stock" if value == 1 else f"{value}x"
        middle = 'text-anchor="middle" class="faint"'
        yield f'<text x="{at:.1f}" y="{bottom + 18}" {middle}>{label}</text>'
    for number, (cell, speeds) in enumerate(cells.items()):
        top = TOP + GAP // 2 + group * number
        name = cell.replace("x", " x ")
        yield f'<text x="{LEFT - 12}" y="{top + BAR + 4}" text-anchor="end">{name}</text>'
        for place, (series, kind) in enumerate(SERIES):
            if series not in speeds:
                continue
            y, speed = top + place * BAR, speeds[series]
            tip = f"<title>{series}, {name}: {speed:.2f}</title>"
            size = f'width="{x_of(speed) - LEFT:.1f}" height="{BAR - 3}"'
            yield f'<rect x="{LEFT}" y="{y}" {size} class="{kind}">{tip}</rect>'
            yield f'<text x="{x_of(speed) + 6:.1f}" y="{y + 11}">{speed:.2f}</text>'
    yield "</svg>"


def render(data: dict) -> str:
    """An SVG document from `h200/vllm_specpv.json`: two bars for each batch and context."""
    return "\n".join(_parts(data)) + "\n"
