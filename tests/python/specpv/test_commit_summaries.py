"""A commit that also completes block summaries: what it leaves equals a fresh computation."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from nwor_specpv import (
    CommitSummaries,
    CommitTail,
    Interceptor,
    NworConfig,
    NworError,
    RoundPlan,
    block_summaries,
    commit,
)
from tests.python.specpv.contexts import DEVICES, FLOAT8, Pages, make_pages, seeded

POISON = 55.0


def ints(values: object, device: torch.device | str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@dataclass
class Round:
    """Requests with tokens in the cache, some of them verified, and accepted rows in staging."""

    layers: list[Pages]
    staged: torch.Tensor  # [2, L, M, H, D]
    path: list[list[int]]
    cached: list[int]
    full: list[int]
    size: int
    start: int
    rows: list[int]

    def lengths(self) -> list[int]:
        return [cached + len(p) for cached, p in zip(self.cached, self.path, strict=True)]

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
    rng: random.Random,
    device: str,
    dtype: torch.dtype,
    batch: int = 3,
    sizes: tuple[int, int] | None = None,
    heads: int = 2,
    tokens: int | None = None,
    deepest: int = 6,
) -> Round:
    """`sizes`: of a block and of a page. `tokens`: of each request, about; None: a few blocks.

    `deepest`: most tokens that a request accepts.
    """
    size, page_size = sizes or rng.choice([(4, 8), (8, 8), (4, 4)])
    dim = rng.choice([16, 64, 80, 128, 256])
    row_dtype = torch.float32 if dtype == FLOAT8 and device == "cpu" else dtype
    row_dtype = torch.bfloat16 if dtype == FLOAT8 and device == "cuda" else row_dtype
    most = tokens or max(40, 2 * size + 8)
    cached = [rng.randrange(tokens - 8 if tokens else 1, most) for _ in range(batch)]
    counts = [rng.randint(0, deepest) for _ in range(batch)]
    rows = sum(counts) + 4
    order = rng.sample(range(rows), sum(counts))
    path, at = [], 0
    for count in counts:
        path.append(sorted(order[at : at + count]))
        at += count
    seed = rng.randrange(1 << 30)
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
                layout=rng.choice(["packed", "packed"]),
                device=device,
                scales=2 if dtype == FLOAT8 else 0,
            )
        )
    staged = torch.randn(2, 2, rows, heads, dim).to(device, row_dtype)
    full = [rng.choice([-1, rng.randrange(0, c + 1)]) for c in cached]
    return Round(
        layers, staged, path, cached, full, size, size * rng.randrange(0, 3),
        rng.sample(range(batch + 2), batch),
    )  # fmt: skip


def run(
    round_: Round,
    summaries: CommitSummaries | None,
    slots: list | None = None,
    tail: CommitTail | None = None,
) -> int:
    device = round_.staged.device
    depth = max(1, *(len(p) for p in round_.path))
    slots = slots or round_.slots()
    status = torch.zeros(8, dtype=torch.int64, device=device)
    scales = [layer.k_scale for layer in round_.layers]
    commit(
        round_.staged[0],
        round_.staged[1],
        [layer.key for layer in round_.layers],
        [layer.value for layer in round_.layers],
        ints([p + [-1] * (depth - len(p)) for p in round_.path], device),
        ints([len(p) for p in round_.path], device),
        torch.tensor([s + [-1] * (depth - len(s)) for s in slots], device=device),
        status,
        k_scales=None if scales[0] is None else scales,
        v_scales=None if scales[0] is None else scales,
        summaries=summaries,
        tail=tail,
    )
    return int(status[0])


def hook(round_: Round, dtype: torch.dtype) -> CommitSummaries:
    device = round_.staged.device
    shape = (2, len(round_.path) + 2, 64, *round_.staged.shape[3:])
    kmax = torch.full(shape, POISON, dtype=dtype, device=device)
    return CommitSummaries(
        kmax,
        kmax.clone(),
        round_.layers[0].table,
        ints(round_.full, device),
        ints(round_.cached, device),
        round_.size,
        round_.start,
        ints(round_.rows, device),
    )


def check_fresh(
    round_: Round, summaries: CommitSummaries, left_out: tuple[tuple[int, int], ...] = ()
) -> None:
    """Every block that was due is as a fresh computation has it; all others are untouched.

    `left_out`: (request, block) that were due all the same.
    """
    device = round_.staged.device
    for layer, pages in enumerate(round_.layers):
        fresh = torch.full_like(summaries.kmax[layer], POISON)
        low = fresh.clone()
        block_summaries(
            pages.key,
            pages.table,
            ints([round_.start] * len(round_.path), device),
            ints(round_.lengths(), device),
            fresh,
            low,
            round_.size,
            pages.k_scale,
            rows=summaries.summary_rows,
        )
        touched = torch.zeros(fresh.shape[:2], dtype=torch.bool)
        for b, (full, length) in enumerate(zip(round_.full, round_.lengths(), strict=True)):
            if full >= 0:
                done = max(0, full - round_.start) // round_.size
                last = max(0, length - round_.start) // round_.size
                touched[round_.rows[b], done:last] = True
        for b, block in left_out:
            touched[round_.rows[b], block] = False
        for got, wanted in ((summaries.kmax[layer], fresh), (summaries.kmin[layer], low)):
            assert torch.equal(got[touched], wanted[touched])
            assert (got[~touched] == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FLOAT8])
def test_completed_blocks_equal_a_fresh_computation(device: str, dtype: torch.dtype) -> None:
    rng = seeded()
    for batch in (1, 3, 3, rng.choice([3, 40])):
        round_ = make_round(rng, device, dtype, batch)
        summaries = hook(round_, torch.float32 if dtype == FLOAT8 else dtype)
        assert run(round_, summaries) == 0
        check_fresh(round_, summaries)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_nan_counts_for_nothing(device: str, dtype: torch.dtype) -> None:
    rng = seeded()
    round_ = make_round(rng, device, dtype, 8)
    for rows in (round_.staged, *(layer.key for layer in round_.layers)):
        rows.masked_fill_(torch.rand(rows.shape, device=device) < 0.3, float("nan"))
    summaries = hook(round_, dtype)
    assert run(round_, summaries) == 0
    check_fresh(round_, summaries)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("batch", "sizes", "heads"),
    [
        (70, (4, 4), 3),
        (9, (32, 16), 5),
        (3, (64, 16), 2),
        (2, (48, 8), 1),
        (33, (16, 16), 8),
        (5, (4, 12), 3),
    ],
    ids=[
        "three warps of requests",
        "a lane each",
        "two warps",
        "one and a half",
        "many heads",
        "pages of twelve",
    ],
)
def test_blocks_of_many_requests_and_of_many_tokens(
    device: str, batch: int, sizes: tuple[int, int], heads: int
) -> None:
    rng = seeded()
    round_ = make_round(rng, device, torch.bfloat16, batch, sizes, heads)
    round_.start = 0
    # None, all and some of the requests are due, and the last one alone.
    own = list(round_.full)
    for full in ([-1] * batch, [0] * batch, own, [-1] * (batch - 1) + [0]):
        round_.full = full
        summaries = hook(round_, torch.bfloat16)
        assert run(round_, summaries) == 0
        check_fresh(round_, summaries)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [32, 33, 64])
def test_blocks_of_more_requests_than_lanes_with_one_draft_each(device: str, batch: int) -> None:
    rng = seeded()
    round_ = make_round(rng, device, torch.bfloat16, batch, (4, 4), deepest=1)
    round_.start = 0
    for full in ([-1] * batch, round_.cached, [0] * batch, [-1] * (batch - 1) + [0]):
        round_.full = full
        summaries = hook(round_, torch.bfloat16)
        assert run(round_, summaries) == 0
        check_fresh(round_, summaries)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [(4, 4), (16, 16), (32, 16), (64, 16)], ids=str)
def test_a_request_that_completes_many_blocks_at_once(
    device: str, dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    """Many times more of them, head by head, than a commit of so few rows has warps."""
    rng = seeded()
    for batch in (1, 2):
        blocks = 60 if sizes[0] <= 16 else 14
        round_ = make_round(rng, device, dtype, batch, sizes, heads=8, tokens=blocks * sizes[0])
        round_.full, round_.start = [0] * batch, 0
        summaries = hook(round_, dtype)
        assert run(round_, summaries) == 0
        check_fresh(round_, summaries)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch", [3, 40])
def test_summaries_and_views_in_one_commit(device: str, dtype: torch.dtype, batch: int) -> None:
    rng = seeded()
    round_ = make_round(rng, device, dtype, batch, (16, 16), heads=3)
    round_.full = [rng.choice([-1, 0]) for _ in range(batch)]
    shape = (2, batch, 3, 12, round_.staged.shape[-1])
    tails = [
        CommitTail(*torch.full((2, *shape), POISON, dtype=dtype, device=device), begin)
        for begin in ints([[rng.choice([-1, 2]) for _ in range(batch)]] * 2, device)
    ]
    summaries = hook(round_, dtype)
    assert run(round_, summaries, tail=tails[0]) == 0
    check_fresh(round_, summaries)
    assert run(round_, None, tail=tails[1]) == 0
    assert torch.equal(tails[0].tail_keys, tails[1].tail_keys)
    assert torch.equal(tails[0].tail_values, tails[1].tail_values)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("page", [-1, 1 << 20])
@pytest.mark.parametrize("size", [16, 64])
def test_blocks_without_a_page_are_left_out(
    device: str, dtype: torch.dtype, page: int, size: int
) -> None:
    rng = seeded()
    for batch in (2, 40):
        round_ = make_round(rng, device, dtype, batch, (size, 16), tokens=3 * size)
        round_.full, round_.start = [0] * batch, 0
        summaries = hook(round_, dtype)
        summaries.block_table = summaries.block_table.clone()
        request, block = rng.randrange(batch), rng.randrange(2)
        summaries.block_table[request, block * size // 16 + rng.randrange(size // 16)] = page
        assert run(round_, summaries) == 0
        check_fresh(round_, summaries, ((request, block),))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("count", [-1, -(2**31), 7, 1 << 20, 2**31 - 1])
def test_counts_out_of_range_lead_nowhere_on_cuda(count: int) -> None:
    """Blocks are looked for before counts are known to be right: nothing may be read beyond."""
    rng, device = seeded(), "cuda"
    for batch in (3, 40):
        round_ = make_round(rng, device, torch.bfloat16, batch)
        round_.full = [0] * batch
        summaries = hook(round_, torch.bfloat16)
        depth = max(1, *(len(p) for p in round_.path))
        counts = [len(p) for p in round_.path]
        counts[rng.randrange(batch)] = count if count != 7 else depth + 1
        status = torch.zeros(8, dtype=torch.int64, device=device)
        commit(
            round_.staged[0],
            round_.staged[1],
            [layer.key for layer in round_.layers],
            [layer.value for layer in round_.layers],
            ints([p + [-1] * (depth - len(p)) for p in round_.path], device),
            ints(counts, device),
            torch.tensor([s + [-1] * (depth - len(s)) for s in round_.slots()], device=device),
            status,
            summaries=summaries,
        )
        assert int(status[0]) != 0
        assert (summaries.kmax == POISON).all()
        assert (summaries.kmin == POISON).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [3, 40])
def test_a_refused_commit_leaves_summaries_alone(device: str, batch: int) -> None:
    rng = seeded()
    round_ = make_round(rng, device, torch.bfloat16, batch)
    round_.full = [0] * batch
    round_.path[0] = [0, 1]
    slots = round_.slots()
    slots[0][1] = 1 << 30
    for layer in round_.layers:
        layer.key.nan_to_num_(0)
        layer.value.nan_to_num_(0)
    before = [layer.key.clone() for layer in round_.layers]
    summaries = hook(round_, torch.bfloat16)
    assert run(round_, summaries, slots) != 0
    assert (summaries.kmax == POISON).all()
    assert (summaries.kmin == POISON).all()
    for layer, old in zip(round_.layers, before, strict=True):
        assert torch.equal(layer.key, old)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_are_committed_without_a_page_for_summaries(device: str) -> None:
    rng = random.Random(1)
    round_ = make_round(rng, device, torch.float32, batch=1)
    round_.cached, round_.full, round_.path, round_.start = [9], [0], [[0, 1, 2]], 0
    summaries = hook(round_, torch.float32)
    summaries.block_table = torch.full_like(summaries.block_table, -1)
    slots = [[5, 6, 7]]
    assert run(round_, summaries, slots) == 0
    assert (summaries.kmax == POISON).all()
    for layer, pages in enumerate(round_.layers):
        rows = pages.key.flatten(0, 1)[slots[0]]
        assert torch.equal(rows, round_.staged[0, layer, :3])


def test_the_interceptors_commit_completes_them_too() -> None:
    rng = seeded()
    pages = make_pages([20, 31], dim=16, page_size=4, layout="packed")
    pages.key.nan_to_num_(0)
    interceptor = Interceptor(NworConfig(strict=True))
    interceptor.bind_layer("only", pages.key, pages.value)
    cached, rows = [11, 21], 5
    interceptor.begin(RoundPlan(query_lens=[rows, rows], num_drafts=[rows - 1, rows - 1]))
    key, value = torch.randn(2, 2 * rows, 2, 16)
    slots = [
        int(pages.table[b, t // 4]) * 4 + t % 4
        for b in range(2)
        for t in range(cached[b] - 1, cached[b] - 1 + rows)
    ]
    interceptor.write("only", key, value, torch.tensor(slots))
    counts = [rng.randrange(rows), rng.randrange(rows)]
    path = torch.full((2, rows), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        path[b, :count] = torch.arange(1, count + 1)
    kmax = torch.full((1, 2, 8, 2, 16), POISON)
    kmin = kmax.clone()
    receipt = interceptor.commit(
        path,
        ints(counts, "cpu"),
        rows="request",
        summaries=CommitSummaries(
            kmax, kmin, pages.table, ints([8, -1], "cpu"), ints(cached, "cpu"), 4
        ),
    )
    assert receipt.ok
    last = (cached[0] + counts[0]) // 4
    tokens = torch.from_numpy(Pages(pages.key, pages.value, pages.table, [20, 31]).tokens(0))
    for block in range(8):
        if 2 <= block < last:
            wanted = tokens[4 * block : 4 * block + 4].amax(0).float()
            assert torch.equal(kmax[0, 0, block], wanted)
        else:
            assert (kmax[0, 0, block] == POISON).all()
    assert (kmax[0, 1] == POISON).all()  # a partial step: its rows are provisional
    interceptor.begin(RoundPlan(query_lens=[1, 1], num_drafts=[0, 0]))
    with pytest.raises(NworError, match="summaries: got"):
        interceptor.commit(path, ints(counts, "cpu"), summaries=3)


WRONG = {
    "layers": (lambda s: {"kmax": s.kmax[:1]}, "kmax: got"),
    "kmin": (lambda s: {"kmin": s.kmin.half()}, "kmin: got"),
    "block size": (lambda s: {"block_size": 0}, "block_size: got 0"),
    "start": (lambda s: {"start_token": -1}, "start_token: got -1"),
    "lens": (lambda s: {"full_lens": s.full_lens[:1]}, "full_lens: got sizes"),
    "rows": (lambda s: {"summary_rows": None}, "kmax: got 5 rows"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_use_is_named(name: str) -> None:
    change, message = WRONG[name]
    round_ = make_round(random.Random(2), "cpu", torch.float32)
    summaries = hook(round_, torch.float32)
    with pytest.raises(NworError, match=message):
        run(round_, CommitSummaries(**(vars(summaries) | change(summaries))))
