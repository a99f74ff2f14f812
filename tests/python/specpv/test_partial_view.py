"""build_view: segments are disjoint, in order, and complete when the budget covers the context."""

from __future__ import annotations

import random

import pytest
import torch

from nwor_specpv import NworError, PartialView, build_view, verify_attention
from tests.python.specpv.contexts import DEVICES, make_pages, seeded


def ints(values: object, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Story:
    """Random requests with random choices of blocks."""

    def __init__(self, rng: random.Random, device: str = "cpu", layers: int = 2) -> None:
        self.size = rng.choice([2, 4, 8])
        self.page_size = self.size * rng.choice([1, 2, 3])
        self.sink, self.window = rng.randrange(0, 3), rng.randrange(0, 4)
        self.layers, self.heads, self.batch = layers, rng.randrange(1, 4), rng.randrange(1, 5)
        self.k = rng.randrange(0, 6)
        self.full = [rng.randrange(0, 120) for _ in range(self.batch)]
        self.committed = [full + rng.randrange(0, 20) for full in self.full]
        self.partial = [rng.random() < 0.8 for _ in range(self.batch)]
        pages = max(self.committed) // self.page_size + 1
        order = torch.randperm(self.batch * pages + 5)
        self.table = order[: self.batch * pages].reshape(self.batch, pages).int()
        self.ids = torch.full((layers, self.batch, self.heads, self.k), -1, dtype=torch.int32)
        self.chosen: dict[tuple[int, int, int], list[int]] = {}
        for b, full in enumerate(self.full):
            candidates = range(max(0, self.window_begin(b) - self.sink))
            count = rng.randrange(0, min(self.k, len(candidates)) + 1)
            for layer in range(layers):
                for head in range(self.heads):
                    chosen = sorted(rng.sample(candidates, count))
                    self.chosen[layer, b, head] = chosen
                    self.ids[layer, b, head, :count] = ints(chosen)
            del full
        room = self.sink + self.k + self.window + 20 // self.size + 2
        self.blocks = torch.full(
            (layers, self.batch, self.heads, room), -9, dtype=torch.int32, device=device
        )
        self.num_blocks = torch.full((self.batch,), -9, dtype=torch.int32, device=device)
        self.view_lens = torch.full_like(self.num_blocks, -9)
        self.device = device

    def window_begin(self, b: int) -> int:
        """In blocks: F less the window, rounded down, never before the sink."""
        return max(self.sink, (self.full[b] - self.window * self.size) // self.size)

    def tokens(self, layer: int, b: int, head: int) -> list[int]:
        """What is to be seen, token by token."""
        seen = list(range(min(self.sink * self.size, self.committed[b])))
        for block in self.chosen[layer, b, head]:
            first = (self.sink + block) * self.size
            seen += range(first, first + self.size)
        return seen + list(range(self.window_begin(b) * self.size, self.committed[b]))

    def run(self) -> None:
        build_view(
            self.ids.to(self.device),
            self.table.to(self.device),
            ints(self.full, self.device),
            ints(self.committed, self.device),
            ints([int(p) for p in self.partial], self.device),
            self.blocks,
            self.num_blocks,
            self.view_lens,
            page_size=self.page_size,
            block_size=self.size,
            sink_blocks=self.sink,
            window_blocks=self.window,
        )

    def shown(self, layer: int, b: int, head: int) -> list[int]:
        """Tokens of the view, found back through the block table."""
        parts = self.page_size // self.size
        where = {int(page): i for i, page in enumerate(self.table[b].tolist())}
        tokens: list[int] = []
        for block in self.blocks[layer, b, head, : int(self.num_blocks[b])].tolist():
            first = (where[block // parts] * parts + block % parts) * self.size
            tokens += range(first, first + self.size)
        return tokens[: int(self.view_lens[b])]


@pytest.mark.parametrize("device", DEVICES)
def test_views_show_each_token_once_and_in_order(device: str) -> None:
    rng = seeded()
    for _ in range(40):
        story = Story(rng, device)
        story.run()
        for b in range(story.batch):
            if not story.partial[b]:
                assert (int(story.num_blocks[b]), int(story.view_lens[b])) == (-1, 0)
                assert (story.blocks[:, b] == -9).all()
                continue
            for layer in range(story.layers):
                for head in range(story.heads):
                    shown = story.shown(layer, b, head)
                    assert shown == story.tokens(layer, b, head)
                    assert shown == sorted(set(shown))


@pytest.mark.parametrize("device", DEVICES)
def test_a_view_without_room_becomes_the_whole_prefix(device: str) -> None:
    blocks = torch.full((1, 2, 1, 4), -9, dtype=torch.int32, device=device)
    lengths = torch.zeros(2, 2, dtype=torch.int32, device=device)
    for committed, expected in ((64, 4), (65, -1)):
        build_view(
            torch.zeros(1, 2, 1, 0, dtype=torch.int32, device=device),
            torch.arange(20, dtype=torch.int32, device=device).reshape(2, 10),
            ints([32, 160], device),
            ints([committed, 161], device),
            ints([1, 1], device),
            blocks,
            lengths[0],
            lengths[1],
            page_size=16,
            block_size=16,
            sink_blocks=1,
            window_blocks=1,
        )
        assert lengths[0].tolist() == [expected, -1]  # the second reaches beyond its pages


@pytest.mark.parametrize("device", DEVICES)
def test_a_budget_that_covers_the_context_is_full_attention(device: str) -> None:
    """Bit for bit: the same tokens in the same order through another list."""
    rng = seeded()
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    length = rng.randrange(100, 200)
    pages = make_pages([length], heads=2, dim=64, dtype=dtype, device=device, layout="packed")
    full = length - rng.randrange(0, 10)
    candidates = full // 16 - 1 - 1
    rows = 3
    query = torch.randn(rows, 4, 64, dtype=dtype, device=device)
    key, value = torch.randn(2, rows, 2, 64, dtype=dtype, device=device)
    pages.value.nan_to_num_()
    blocks = torch.full((1, 1, 2, 20), -1, dtype=torch.int32, device=device)
    num_blocks, view_lens = ints([0], device), ints([0], device)
    build_view(
        torch.arange(candidates, dtype=torch.int32, device=device).expand(1, 1, 2, -1).contiguous(),
        pages.table,
        ints([full], device),
        ints([length], device),
        ints([1], device),
        blocks,
        num_blocks,
        view_lens,
        page_size=16,
        block_size=16,
        sink_blocks=1,
        window_blocks=1,
    )
    assert int(view_lens) == length
    common = (
        query, key, value, pages.key, pages.value, pages.table,
        ints([length], device), ints([0, rows], device), None, 0.125,
    )  # fmt: skip
    whole = verify_attention(*common)
    view = PartialView(blocks[0], num_blocks, view_lens, 16)
    assert torch.isfinite(whole).all()
    assert torch.equal(verify_attention(*common, view=view), whole)


def good() -> dict:
    return {
        "ids": torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        "block_table": torch.arange(4, dtype=torch.int32)[None],
        "full_lens": ints([60]),
        "committed_lens": ints([62]),
        "partial": ints([1]),
        "blocks": torch.full((1, 1, 1, 8), -9, dtype=torch.int32),
        "num_blocks": ints([-9]),
        "view_lens": ints([-9]),
        "page_size": 16,
        "block_size": 16,
        "sink_blocks": 1,
        "window_blocks": 1,
    }


WRONG = {
    "block size": ({"block_size": 24}, "block_size: got 24, expected a divisor of the page size"),
    "F beyond N": ({"full_lens": ints([63])}, r"full_lens\[0\]: got 63"),
    "no candidate": ({"ids": ints([[[[2]]]])}, r"ids\[0, 0, 0, 0\]: got 2"),
    "order": ({"ids": ints([[[[1, 0]]]]), "window_blocks": 0}, r"ids\[0, 0, 0, 1\]: got 0"),
    "uneven": (
        {"ids": ints([[[[0], [-1]]]]), "blocks": torch.zeros(1, 1, 2, 8, dtype=torch.int32)},
        r"ids\[0, 0, 1\]: got 0 blocks, expected 1",
    ),
    "layers": ({"ids": torch.zeros(2, 1, 1, 1, dtype=torch.int32)}, "ids: got sizes"),
    "sink": ({"sink_blocks": -1}, "sink_blocks"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_named_and_writes_nothing(name: str) -> None:
    changes, message = WRONG[name]
    arguments = good() | changes
    with pytest.raises(NworError, match=message):
        build_view(**arguments)
    assert arguments["num_blocks"].tolist() == [-9]


def on_cuda(arguments: dict) -> dict:
    return {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


@pytest.mark.skipif("cuda" not in DEVICES, reason="no CUDA device")
@pytest.mark.parametrize("name", ["F beyond N", "no candidate", "uneven", "uneven layers", "far"])
def test_on_cuda_lists_that_are_no_view_become_the_whole_prefix(name: str) -> None:
    rows = {"blocks": torch.full((2, 1, 1, 8), -9, dtype=torch.int32)}
    more = {
        "uneven layers": rows | {"ids": ints([[[[0, -1]]], [[[0, 1]]]])},
        "far": rows | {"ids": ints([[[[0]]], [[[2**31 - 1]]]])},
    }
    arguments = on_cuda(good() | (more[name] if name in more else WRONG[name][0]))
    build_view(**arguments)
    assert arguments["num_blocks"].tolist() == [-1]
    assert arguments["view_lens"].tolist() == [0]


@pytest.mark.skipif("cuda" not in DEVICES, reason="no CUDA device")
def test_on_cuda_an_id_amid_a_list_leads_nowhere() -> None:
    arguments = on_cuda(good() | {"ids": ints([[[[2**30, 1]]]]), "window_blocks": 0})
    build_view(**arguments)
    assert arguments["num_blocks"].tolist() == [4]
    assert arguments["blocks"][0, 0, 0, :4].tolist() == [0, -1, 2, 3]


def test_fakes_and_schemas() -> None:
    arguments = tuple(good().values())
    torch.library.opcheck(torch.ops.nwor_specpv.build_view.default, arguments)
