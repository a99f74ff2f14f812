"""A commit that feeds compact views: what they get is what the cache holds, or nothing."""

from __future__ import annotations

import random

import pytest
import torch

from nwor_specpv import COMMIT_ERRORS, CommitTail, Interceptor, NworConfig, NworError, RoundPlan
from tests.python.specpv.contexts import DEVICES, FLOAT8, Pages, make_pages, seeded
from tests.python.specpv.test_commit_summaries import Round, hook, ints, make_round, run

POISON = 33.0
TAIL_FULL = list(COMMIT_ERRORS).index("tail_full")


def read_back(pages: Pages, side: str, request: int, token: int) -> torch.Tensor:
    """[H, D] in float32: one token of one request, found through its page."""
    cache = getattr(pages, side)
    page = int(pages.table[request, token // cache.shape[1]])
    row = cache[page, token % cache.shape[1]].float()
    return row if pages.k_scale is None else row * pages.k_scale.reshape(-1, 1)


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
    return CommitTail(
        keys, keys.clone(), begin, root_slots(round_) if roots else None, torch.full_like(begin, -5)
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FLOAT8])
@pytest.mark.parametrize("roots", [True, False])
def test_views_get_what_the_cache_holds(device: str, dtype: torch.dtype, roots: bool) -> None:
    rng = seeded()
    for batch in (1, 3, rng.choice([3, 40])):
        round_ = make_round(rng, device, dtype, batch)
        begins = [rng.choice([-1, 0, rng.randrange(30)]) for _ in round_.path]
        tail = views(round_, begins, 40, roots)
        summaries = hook(round_, torch.float32) if rng.random() < 0.5 else None
        assert run(round_, summaries, tail=tail) == 0
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
                        wanted = read_back(pages, side, b, token).to(row.dtype)
                        assert torch.equal(row[:, begin + i], wanted)
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
    assert run(round_, None, tail=tight) == TAIL_FULL
    assert (tight.tail_keys == POISON).all()
    assert tight.tail_held.tolist() == [-5] * 3
    for layer, old in zip(round_.layers, before, strict=True):
        assert torch.equal(layer.key, old)
    wrong = views(round_, fits, 20)
    wrong.root_slots[2] = 1 << 40
    assert list(COMMIT_ERRORS)[run(round_, None, tail=wrong)] == "slot_range"
    assert run(round_, None, tail=views(round_, fits, 20)) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("roots", [True, False])
def test_rows_behind_the_last_number_have_no_room(device: str, count: int, roots: bool) -> None:
    """2^31 - 1 and the root are more than 32 bits hold: the end must not become negative."""
    round_ = make_round(seeded(), device, torch.float32)
    round_.path = [[], list(range(count)), []]
    tail = views(round_, [3, 2**31 - 1, 3], 20, roots)
    assert run(round_, None, [[], [5][:count], []], tail) == TAIL_FULL
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
    "begin as held": (lambda t: {"tail_held": t.tail_begin}, "tail_held: got memory of tail_begin"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_named(name: str) -> None:
    change, message = WRONG[name]
    round_ = make_round(random.Random(2), "cpu", torch.float32)
    tail = views(round_, [0, 0, 0], 20)
    with pytest.raises(NworError, match=message):
        run(round_, None, tail=CommitTail(**(vars(tail) | change(tail))))
