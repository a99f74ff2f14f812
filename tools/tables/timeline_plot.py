"""The drawing of a verification step: our ranges and the GPU's kernels over time, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from .attention_plot import STYLE

WIDTH, LEFT, RIGHT, TOP, LANE, GAP = 760, 112, 16, 76, 22, 10
COLOURS = {
    "attention": ("#8250df", "#bc8cff"),
    "matrix products": ("#8c959f", "#6e7681"),
    "nwor.stage": ("#0969da", "#58a6ff"),
    "nwor.attend": ("#1a7f37", "#3fb950"),
    "nwor.commit": ("#bc4c00", "#f0883e"),
    "others": ("#d4a72c", "#9e6a03"),
}
NAMES = {name: f"k{number}" for number, name in enumerate(COLOURS)}
_MATRIX = ("gemm", "nvjet", "cutlass", "cublas", "xmma", "splitk")
LISTED = 16  # kernels below a close-up
AROUND = 6  # the commit's kernels


@dataclass(frozen=True)
class Block:
    name: str
    begin: float
    us: float
    kind: str

    @property
    def end(self) -> float:
        return self.begin + self.us


def kind_of(name: str, inside: str) -> str:
    """What a kernel counts as: the range that launched it, or what its name says."""
    lower = name.lower()
    if inside in COLOURS:
        return inside
    if "flash" in lower or "attn" in lower:
        return "attention"
    return "matrix products" if any(word in lower for word in _MATRIX) else "others"


def kernels_of(data: dict[str, Any]) -> list[Block]:
    return [
        Block(name, begin, us, kind_of(name, inside))
        for name, begin, us, _, inside in data["kernels"]
    ]


def _style() -> str:
    light, dark = (
        " ".join(f".{NAMES[name]} {{ fill: {pair[mode]}; }}" for name, pair in COLOURS.items())
        for mode in (0, 1)
    )
    more = " .part { fill: none; stroke: #59636e; } .small { font-size: 11px; }"
    return f"{STYLE}  {light}{more}\n  @media (prefers-color-scheme: dark) {{ {dark} }}\n"


class Panel:
    """Lanes below each other over one axis of time. Thread-safety: none."""

    def __init__(self, top: float, begin: float, end: float) -> None:
        self.top, self._begin, self._end = top, begin, end

    def _x(self, moment: float) -> float:
        inside = min(max(moment, self._begin), self._end)
        share = (inside - self._begin) / (self._end - self._begin)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def title(self, text: str) -> Iterator[str]:
        yield f'<text x="12" y="{self.top + 12:.0f}" class="title">{escape(text)}</text>'
        self.top += LANE

    def lane(
        self, name: str, blocks: Sequence[Block], *, framed: bool = False, numbers: bool = False
    ) -> Iterator[str]:
        y = self.top
        yield f'<text x="{LEFT - 10}" y="{y + 15:.0f}" text-anchor="end">{escape(name)}</text>'
        for number, block in enumerate(blocks, 1):
            left = self._x(block.begin)
            width = max(self._x(block.end) - left, 0.6)
            kind = "part" if framed else NAMES[block.kind]
            tip = f"<title>{escape(block.name)}: {block.us:.1f} us</title>"
            box = f'x="{left:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 4}"'
            yield f'<rect {box} class="{kind}">{tip}</rect>'
            said = block.name if framed else str(number) if numbers else ""
            if said and width > 7 * len(said):
                # Parts lie within each other: their names stand where they begin.
                x, anchor = (left + 4, "start") if framed else (left + width / 2, "middle")
                at = f'x="{x:.1f}" y="{y + 13}" text-anchor="{anchor}" class="small"'
                yield f"<text {at}>{escape(said)}</text>"
        self.top += LANE

    def axis(self) -> Iterator[str]:
        for fourth in range(5):
            moment = self._begin + (self._end - self._begin) * fourth / 4
            x = self._x(moment)
            anchor = ("start", "middle", "middle", "middle", "end")[fourth]
            at = f'x="{x:.1f}" y="{self.top + 14:.0f}" text-anchor="{anchor}" class="faint"'
            yield f"<text {at}>{moment:.0f} us</text>"
        self.top += LANE

    def listing(self, blocks: Sequence[Block]) -> Iterator[str]:
        """Names and times of numbered kernels, in two columns."""
        shown = blocks[:LISTED]
        half = -(-len(shown) // 2)
        for number, block in enumerate(shown):
            x = LEFT - 100 + number // half * 372
            y = self.top + 15 + number % half * 17
            yield f'<rect x="{x}" y="{y - 9}" width="9" height="9" class="{NAMES[block.kind]}"/>'
            said = f"{number + 1}  {block.name}: {block.us:.1f} us"
            yield f'<text x="{x + 15}" y="{y}" class="small">{escape(said)}</text>'
        self.top += 17 * half + GAP


def layer_of(kernels: Sequence[Block]) -> list[Block]:
    """From the first kernel of a range inside a layer to the next layer's, in the middle."""
    first = next((block.kind for block in kernels if block.kind.startswith("nwor.")), "")
    places = [
        index
        for index, block in enumerate(kernels)
        if block.kind == first and (index == 0 or kernels[index - 1].kind != first)
    ]
    if len(places) < 3:
        return list(kernels[:LISTED])
    middle = len(places) // 2
    return list(kernels[places[middle - 1] : places[middle]])


def end_of(kernels: Sequence[Block]) -> list[Block]:
    """The kernels around the commit."""
    at = next((i for i, block in enumerate(kernels) if block.kind == "nwor.commit"), None)
    if at is None:
        return []
    return list(kernels[max(0, at - AROUND) : at + AROUND])


def _parts(data: dict[str, Any]) -> Iterator[str]:
    kernels = sorted(kernels_of(data), key=lambda block: block.begin)
    ranges = [Block(name, begin, us, kind_of("", name)) for name, begin, us in data["ranges"]]
    parts = [Block(name, begin, us, "others") for name, begin, us in data["parts"]]
    whole = Panel(TOP, 0.0, max(block.end for block in (*kernels, *parts)))
    body = [*whole.title("the whole step")]
    body += whole.lane("host, parts", parts, framed=True)
    body += whole.lane("host, ranges", ranges)
    body += whole.lane("GPU, kernels", kernels)
    body += whole.axis()
    top = whole.top + GAP
    close_ups = {
        "one layer on the GPU": layer_of(kernels),
        "the commit on the GPU": end_of(kernels),
    }
    for name, blocks in close_ups.items():
        if blocks:
            panel = Panel(top, blocks[0].begin, blocks[-1].end)
            body += panel.title(name)
            body += panel.lane("kernels", blocks, numbers=True)
            body += panel.axis()
            body += panel.listing(blocks)
            top = panel.top + GAP
    model = data["model"] + (f", {data['layers']} layers" if data["layers"] else "")
    title = (
        f"A verification step: {model}, {data['batch']} requests of {data['context']} tokens, "
        f"{data['drafts']} drafts, eager"
    )
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" '
        f'width="{WIDTH}" height="{top:.0f}" role="img" aria-label="{escape(title)}">'
    )
    yield f"<style>{_style()}</style>"
    yield f'<text x="12" y="24" class="title">{escape(title)}</text>'
    x = 14.0
    for name in COLOURS:
        yield f'<rect x="{x:.0f}" y="38" width="12" height="12" class="{NAMES[name]}"/>'
        yield f'<text x="{x + 17:.0f}" y="49">{escape(name)}</text>'
        x += 34 + 7.4 * len(name)
    yield from body
    yield "</svg>"


def render(data: dict[str, Any]) -> str:
    """An SVG document from the result of benchmarks/vllm/timeline.py."""
    return "\n".join(_parts(data)) + "\n"
