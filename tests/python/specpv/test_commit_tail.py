"""A commit that feeds compact views: what they get is what the cache holds, or nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from nwor_specpv import (
    COMMIT_ERRORS,
    CommitTail,
    Interceptor,
    NworConfig,
    NworError,
    RoundPlan,
    commit,
)
from tests.python.specpv.contexts import DEVICES, FLOAT8, Pages, make_pages, seeded

POISON = 33.0
TAIL_FULL = list(COMMIT_ERRORS).index("tail_full")


def ints(values: object, device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@dataclass
class Round:
    """Requests with tokens in the cache and accepted rows in staging."""

    layers: list[Pages]
    staged: torch.Tensor  # [2, L, M, H, D]
    path: list[list[int]]
    cached: list[int]

    def slots(self) -> list[list[int]]:
        page_size = self.layers[0].key.shape[1]
        table = self.layers[0].table
        return [
            [
                int(table[b, t // page_size]) * page_size + t % page_size
                for t in range(cached, cached + len(path))
            ]
            for b, (cached, path) in enumerate(zip(self.cached, self.path, strict=True))
        ]


def make_round(
    rng: random.Random, device: str, dtype: torch.dtype, batch: int = 3, deepest: int = 6
) -> Round:
    """`deepest`: most tokens that a request accepts."""
    heads, dim = 2, rng.choice([16, 64, 80, 128, 256])
    cached = [rng.randrange(1, 40) for _ in range(batch)]
    counts = [rng.randint(0, deepest) for _ in range(batch)]
    rows = sum(counts) + 4
    order = rng.sample(range(rows), sum(counts))
    path, at = [], 0
    for count in counts:
        path.append(sorted(order[at : at + count]))
        at += count
    seed, page_size = rng.randrange(1 << 30), rng.choice([4, 8])
    layers = []
    for _ in range(2):
        torch.manual_seed(seed)  # the same pages in every layer
        layers.append(
            make_pages(
                [c + n for c, n in zip(cached, counts, strict=True)],
                heads=heads,
                dim=dim,
                page_size=page_size,
                dtype=dtype,
                layout="packed",
                device=device,
            )
        )
    staged = torch.randn(2, 2, rows, heads, dim).to(device, dtype)
    return Round(layers, staged, path, cached)


def run(round_: Round, tail: CommitTail, slots: list | None = None) -> int:
    device = round_.staged.device
    depth = max(1, *(len(p) for p in round_.path))
    slots = slots or round_.slots()
    status = torch.zeros(8, dtype=torch.int64, device=device)
    commit(
        round_.staged[0],
        round_.staged[1],
        [layer.key for layer in round_.layers],
        [layer.value for layer in round_.layers],
        ints([p + [-1] * (depth - len(p)) for p in round_.path], device),
        ints([len(p) for p in round_.path], device),
        torch.tensor([s + [-1] * (depth - len(s)) for s in slots], device=device),
        status,
        tail=tail,
    )
    return int(status[0])


def read_back(pages: Pages, side: str, request: int, token: int) -> torch.Tensor:
    """[H, D]: one token of one request, found through its page."""
    cache = getattr(pages, side)
    page = int(pages.table[request, token // cache.shape[1]])
    return cache[page, token % cache.shape[1]]


def root_slots(round_: Round) -> torch.Tensor:
    """Of the last token that is in the cache before the accepted rows."""
    size, table = round_.layers[0].key.shape[1], round_.layers[0].table
    slots = [
        int(table[b, (cached - 1) // size]) * size + (cached - 1) % size
        for b, cached in enumerate(round_.cached)
    ]
    return torch.tensor(slots, device=round_.staged.device)


def views(round_: Round, begins: list[int], capacity: int, roots: bool = True) -> CommitTail:
    _, layers, _, heads, dim = round_.staged.shape
    shape = (layers, len(begins), heads, capacity, dim)
    keys = torch.full(shape, POISON, dtype=round_.staged.dtype, device=round_.staged.device)
    begin = ints(begins, round_.staged.device)
    slots = root_slots(round_) if roots else torch.full_like(begin, -1, dtype=torch.int64)
    return CommitTail(keys, keys.clone(), begin, slots, torch.full_like(begin, -5))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("roots", [True, False])
def test_views_get_what_the_cache_holds(device: str, dtype: torch.dtype, roots: bool) -> None:
    rng = seeded()
    for batch, deepest in ((1, 6), (3, 6), rng.choice([(3, 6), (40, 6), (33, 1), (64, 1)])):
        round_ = make_round(rng, device, dtype, batch, deepest)
        begins = [rng.choice([-1, 0, rng.randrange(30)]) for _ in round_.path]
        tail = views(round_, begins, 40, roots)
        assert run(round_, tail) == 0
        for b, (begin, path) in enumerate(zip(begins, round_.path, strict=True)):
            if begin < 0:
                assert (tail.tail_keys[:, b] == POISON).all()
                assert int(tail.tail_held[b]) == -5
                continue
            first = round_.cached[b] - int(roots)
            tokens = range(first, round_.cached[b] + len(path))
            assert int(tail.tail_held[b]) == begin + len(tokens)
            for layer, pages in enumerate(round_.layers):
                for got, side in ((tail.tail_keys, "key"), (tail.tail_values, "value")):
                    row = got[layer, b]
                    for i, token in enumerate(tokens):
                        assert torch.equal(row[:, begin + i], read_back(pages, side, b, token))
                    assert (row[:, :begin] == POISON).all()
                    assert (row[:, begin + len(tokens) :] == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_view_without_room_refuses_the_whole_commit(device: str) -> None:
    rng = seeded()
    round_ = make_round(rng, device, torch.bfloat16)
    for layer in round_.layers:
        layer.key.nan_to_num_(0)
        layer.value.nan_to_num_(0)
    before = [layer.key.clone() for layer in round_.layers]
    lengths = [len(p) for p in round_.path]
    fits = [20 - 1 - count for count in lengths]
    tight = views(round_, [fits[0], fits[1] + 1, fits[2]], 20)
    assert run(round_, tight) == TAIL_FULL
    assert (tight.tail_keys == POISON).all()
    assert tight.tail_held.tolist() == [-5] * 3
    for layer, old in zip(round_.layers, before, strict=True):
        assert torch.equal(layer.key, old)
    wrong = views(round_, fits, 20)
    wrong.root_slots[2] = 1 << 40
    assert list(COMMIT_ERRORS)[run(round_, wrong)] == "slot_range"
    assert run(round_, views(round_, fits, 20)) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("roots", [True, False])
def test_rows_behind_the_last_number_have_no_room(device: str, count: int, roots: bool) -> None:
    """2^31 - 1 and the root are more than 32 bits hold: the end must not become negative."""
    round_ = make_round(seeded(), device, torch.float32)
    round_.path = [[], list(range(count)), []]
    tail = views(round_, [3, 2**31 - 1, 3], 20, roots)
    assert run(round_, tail, [[], [5][:count], []]) == TAIL_FULL
    assert (tail.tail_keys == POISON).all()
    assert (tail.tail_values == POISON).all()
    assert tail.tail_held.tolist() == [-5] * 3


def test_the_interceptors_commit_feeds_them_too() -> None:
    rng = seeded()
    pages = make_pages([20, 31], dim=16, page_size=4, layout="packed")
    pages.key.nan_to_num_(0)
    pages.value.nan_to_num_(0)
    interceptor = Interceptor(NworConfig(strict=True))
    interceptor.bind_layer("only", pages.key, pages.value)
    cached, rows = [11, 21], 5
    interceptor.begin(RoundPlan(query_lens=[rows, rows], num_drafts=[rows - 1, rows - 1]))
    key, value = torch.randn(2, 2 * rows, 2, 16)
    slots = torch.tensor(
        [
            int(pages.table[b, t // 4]) * 4 + t % 4
            for b in range(2)
            for t in range(cached[b] - 1, cached[b] - 1 + rows)
        ]
    )
    interceptor.write("only", key, value, slots)
    counts = [rng.randrange(rows), rng.randrange(rows)]
    path = torch.full((2, rows), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        path[b, :count] = torch.arange(1, count + 1)
    keys = torch.full((1, 2, 2, 12, 16), POISON)
    held = torch.zeros(2, dtype=torch.int32)
    tail = CommitTail(keys, keys.clone(), ints([3, 6], "cpu"), slots[::rows].contiguous(), held)
    assert interceptor.commit(path, ints(counts, "cpu"), rows="request", tail=tail).ok
    assert held.tolist() == [3 + 1 + counts[0], 6 + 1 + counts[1]]
    for b, begin in enumerate([3, 6]):
        for i in range(1 + counts[b]):
            assert torch.equal(keys[0, b, :, begin + i], key[b * rows + i])
    interceptor.begin(RoundPlan(query_lens=[1, 1], num_drafts=[0, 0]))
    with pytest.raises(NworError, match="tail: got"):
        interceptor.commit(path, ints(counts, "cpu"), tail=3)


WRONG = {
    "layers": (lambda t: {"tail_keys": t.tail_keys[:1]}, "tail_keys: got"),
    "values": (lambda t: {"tail_values": t.tail_values.half()}, "tail_values: got"),
    "dtype": (lambda t: {"tail_keys": t.tail_keys.half()}, "tail_keys: got dtype"),
    "begin": (lambda t: {"tail_begin": t.tail_begin[:1]}, "tail_begin: got sizes"),
    "roots": (lambda t: {"root_slots": t.root_slots.int()}, "root_slots: got"),
    "held": (lambda t: {"tail_held": t.tail_held.long()}, "tail_held: got"),
    "begin as held": (
        lambda t: {"tail_held": t.tail_begin},
        "tail_held: got the memory of tail_begin",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_named(name: str) -> None:
    change, message = WRONG[name]
    round_ = make_round(random.Random(2), "cpu", torch.float32)
    tail = views(round_, [0, 0, 0], 20)
    with pytest.raises(NworError, match=message):
        run(round_, CommitTail(**(vars(tail) | change(tail))))


def test_float8_caches_are_refused() -> None:
    round_ = make_round(random.Random(2), "cpu", torch.float32)
    tail = views(round_, [0, 0, 0], 20)
    for layer in round_.layers:
        layer.key, layer.value = layer.key.to(FLOAT8), layer.value.to(FLOAT8)
    with pytest.raises(NworError, match="tail: got a cache of float8_e4m3fn, expected float32"):
        run(round_, tail)
