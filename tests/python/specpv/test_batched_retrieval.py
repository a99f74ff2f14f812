"""select_blocks for batches: the rows of all requests in one tensor, a range for each, any lengths.

Requests refresh together or one of many, with as many rows as they were said to have at most or
with more; what was said must not change what is chosen.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import pytest
import torch

from nwor_specpv import NworError, select_blocks
from tests.python.specpv.contexts import DEVICES, seeded

REDUCTIONS = list(itertools.product(["specpv", "quest"], ["mean", "max", "last"], ["mean", "max"]))
# Requests, rows that one has at most, KV heads, query heads of each.
BATCHES = {
    "8 trees": (8, 24, 2, 4),
    "24 chains": (24, 6, 3, 1),
    "70 roots": (70, 1, 1, 3),
    "many rows": (3, 70, 1, 8),
    "more than fit": (2, 300, 1, 6),
}
DIMS = [64, 96, 128, 192, 256]


def reduced_sums(
    rows: torch.Tensor,  # [Q, Hq, D]
    kmax: torch.Tensor,  # [N, Hkv, D]
    kmin: torch.Tensor,
    score: str,
    query_reduce: str,
    group_reduce: str,
) -> torch.Tensor:
    """[Hkv, N] in float64, means left as sums."""
    kv_heads = kmax.shape[1]
    grouped = rows.double().unflatten(1, (kv_heads, -1))
    high, low = kmax.double(), kmin.double()
    if not len(rows):
        return torch.zeros(kv_heads, len(kmax), dtype=torch.float64)
    if score == "specpv":
        upper, lower = (torch.einsum("qhgd,nhd->qghn", grouped, side) for side in (high, low))
        scores = torch.maximum(upper, lower)
    else:
        middle, half = (high + low) / 2, (high - low) / 2  # max(q a, q b) = q m + |q| h
        scores = torch.einsum("qhgd,nhd->qghn", grouped, middle)
        scores = scores + torch.einsum("qhgd,nhd->qghn", grouped.abs(), half)
    of_heads = {"mean": scores.sum(0), "max": scores.amax(0), "last": scores[-1]}[query_reduce]
    return of_heads.sum(0) if group_reduce == "mean" else of_heads.amax(0)


@dataclass
class Batch:
    query: torch.Tensor  # [rows of all requests, Hq, D]
    ranges: list[tuple[int, int]]
    kmax: torch.Tensor  # [requests, N, Hkv, D]
    kmin: torch.Tensor
    stored: int  # rows of a store of ids
    rows: list[int]  # of it
    candidates: list[int]

    def chosen(self, request: int, k: int, *reductions: str) -> list[list[int]]:
        (begin, end), count = self.ranges[request], self.candidates[request]
        summaries = self.kmax[request, :count], self.kmin[request, :count]
        scores = reduced_sums(self.query[begin:end], *summaries, *reductions)
        order = torch.sort(scores, descending=True, stable=True).indices[:, :k].sort(1).values
        return [ids + [-1] * (k - len(ids)) for ids in order.tolist()]


def invent(rng: random.Random, requests: int, most: int, kv_heads: int, group: int) -> Batch:
    """Small integers, exact in every dtype and sum; NaN wherever nothing may be read."""
    dim, blocks = rng.choice(DIMS), rng.randrange(1, 90)
    ranges, total = [], 0
    for b in range(requests):
        begin = total + rng.randrange(4)  # rows fed again come before a tree's
        rows = most if b == 0 else rng.choice([0, 1, most, rng.randrange(most + 1)])
        ranges.append((begin, begin + rows))
        total = begin + rows
    query = torch.full((total + 2, kv_heads * group, dim), float("nan"))
    for begin, end in ranges:
        query[begin:end] = torch.randint(-2, 3, query[begin:end].shape).float()
    stored = requests + rng.randrange(3)
    rows = rng.sample(range(stored), requests)
    candidates = [rng.choice([-1, 0, blocks, rng.randrange(blocks + 1)]) for _ in rows]
    if rng.random() < 0.3:  # one of all refreshes
        candidates = [-1] * requests
    candidates[rng.randrange(requests)] = blocks
    kmin = torch.randint(-2, 3, (requests, blocks, kv_heads, dim)).float()
    kmax = kmin + torch.randint(0, 3, kmin.shape)
    for b, count in enumerate(candidates):
        kmin[b, max(0, count) :] = kmax[b, max(0, count) :] = float("nan")
    return Batch(query, ranges, kmax, kmin, stored, rows, candidates)


@dataclass
class Pages:
    """The summaries of a batch by pages, everything else NaN."""

    kmax: torch.Tensor  # [pages, blocks of a page, Hkv, D]
    kmin: torch.Tensor
    table: torch.Tensor  # [requests, pages of one] int32
    first: int  # block of each text that is the first candidate


def lay_out(rng: random.Random, batch: Batch) -> Pages:
    """Pages in any order. Columns that no candidate lies in name none."""
    requests, blocks = batch.kmax.shape[:2]
    parts, first = rng.choice([1, 2, 4]), rng.randrange(5)
    columns = -(-(first + blocks) // parts) + rng.randrange(3)
    order = torch.randperm(requests * columns + 3)
    table = order[: requests * columns].reshape(requests, columns).int()
    shape = (len(order), parts, *batch.kmax.shape[2:])
    pages = Pages(*(torch.full(shape, float("nan")) for _ in range(2)), table, first)
    for b, count in enumerate(batch.candidates):
        for i in range(max(0, count)):
            at = int(table[b, (first + i) // parts]), (first + i) % parts
            pages.kmax[at], pages.kmin[at] = batch.kmax[b, i], batch.kmin[b, i]
        unused = -(-(first + count) // parts) if count > 0 else 0
        table[b, unused:] = rng.choice([-1, len(order), 2**31 - 1])
    return pages


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", BATCHES)
@pytest.mark.parametrize(("score", "query_reduce", "group_reduce"), REDUCTIONS)
@pytest.mark.parametrize("by_pages", [False, True])
def test_ranges_of_one_tensor(
    device: str, size: str, score: str, query_reduce: str, group_reduce: str, *, by_pages: bool
) -> None:
    rng = seeded()
    requests, most, kv_heads, group = BATCHES[size]
    batch = invent(rng, requests, most, kv_heads, group)
    dtype = rng.choice([torch.bfloat16, torch.float16])
    k = rng.randrange(1, batch.kmax.shape[1] + 3)
    reductions = score, query_reduce, group_reduce

    def ints(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    packed = batch.query.to(device, dtype)[None].expand(requests, -1, -1, -1)
    summaries = batch.kmax.to(device, dtype), batch.kmin.to(device, dtype)
    blocks, table, first = batch.kmax.shape[1], None, 0
    if by_pages:
        pages = lay_out(rng, batch)
        summaries = pages.kmax.to(device, dtype), pages.kmin.to(device, dtype)
        table, first = pages.table.to(device), pages.first
        blocks = table.shape[1] * pages.kmax.shape[1]
    for max_rows in {0, most, 1}:
        ids = ints([[[77] * k] * kv_heads] * batch.stored)
        scores = torch.full((requests * kv_heads * blocks,), float("nan"))
        select_blocks(
            packed,
            *summaries,
            ints(batch.candidates),
            k,
            *reductions,
            query_rows=ints(batch.ranges),
            max_rows=max_rows,
            out=ids,
            scores=scores.to(device),
            rows=ints(batch.rows),
            block_table=table,
            first_block=first,
        )
        wanted = [[[77] * k] * kv_heads for _ in range(batch.stored)]
        for b, (row, count) in enumerate(zip(batch.rows, batch.candidates, strict=True)):
            if count >= 0:
                wanted[row] = batch.chosen(b, k, *reductions)
        assert ids.tolist() == wanted, f"max_rows={max_rows}, {batch.ranges}, {batch.candidates}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", ["specpv", "quest"])
@pytest.mark.parametrize("dim", DIMS)
def test_long_contexts_together(device: str, score: str, dim: int) -> None:
    """Real numbers, as a batch of long contexts refreshes: beyond rounding the best are taken."""
    rng = seeded()
    requests, rows = (8, 24) if device == "cuda" else (2, 3)
    blocks, kv_heads, group, k = (2038, 8, 4, 256) if device == "cuda" else (60, 2, 4, 9)
    dtype = rng.choice([torch.bfloat16, torch.float16])
    counts = [blocks, *(rng.randrange(k, blocks + 1) for _ in range(requests - 1))]
    query = torch.randn(requests * rows, kv_heads * group, dim, device=device).to(dtype)
    kmin = torch.randn(requests, blocks, kv_heads, dim, device=device).to(dtype)
    kmax = (kmin.float() + torch.rand(kmin.shape, device=device)).to(dtype)
    ranges = torch.arange(requests * rows + 1, device=device)[::rows].int()
    ids = select_blocks(
        query[None].expand(requests, -1, -1, -1),
        kmax,
        kmin,
        torch.tensor(counts, dtype=torch.int32, device=device),
        k,
        score,
        query_rows=torch.stack([ranges[:-1], ranges[1:]], 1).contiguous(),
        max_rows=rows,
    )
    for b, count in enumerate(counts):
        own = query[b * rows : (b + 1) * rows].cpu()
        summaries = kmax[b, :count].cpu(), kmin[b, :count].cpu()
        scores = reduced_sums(own, *summaries, score, "mean", "mean")
        taken = torch.zeros_like(scores).bool().scatter_(1, ids[b].long().cpu(), True)
        assert taken.sum(1).tolist() == [min(k, count)] * kv_heads
        if k < count:
            least = scores.masked_fill(~taken, float("inf")).amin(1)
            most = scores.masked_fill(taken, -float("inf")).amax(1)
            assert (least >= most - 1e-5 * scores.abs().amax()).all()


def test_a_bound_below_zero_is_named() -> None:
    summary = torch.zeros(1, 4, 1, 8)
    count = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(NworError, match="max_rows: got -1, expected 0"):
        select_blocks(torch.zeros(1, 1, 1, 8), summary, summary, count, 2, max_rows=-1)


def test_wrong_pages_are_named() -> None:
    """A candidate in no page, a table of other requests, pages without a table."""
    store, count = torch.zeros(6, 2, 1, 8), torch.tensor([3], dtype=torch.int32)
    table = torch.tensor([[5, 0, 6]], dtype=torch.int32)
    query, ids = torch.zeros(1, 1, 1, 8), torch.full((1, 1, 2), -1, dtype=torch.int32)

    def choose(first: int, **changes: torch.Tensor) -> None:
        given = {"out": ids, "block_table": table} | changes
        select_blocks(query, store, store, count, 2, first_block=first, **given)

    choose(1)
    assert ids.tolist() == [[[0, 1]]]
    for columns in (3, 2):  # a page that the store has not, no page at all
        with pytest.raises(NworError, match="but block 4 lies in none of the 6 pages"):
            choose(2, block_table=table[:, :columns].contiguous())
    with pytest.raises(NworError, match="block_table: got 2 requests, expected 1"):
        choose(0, block_table=table.expand(2, 3).contiguous())
    with pytest.raises(NworError, match="first_block: got -1, expected 0 or more"):
        choose(-1)
    own = torch.zeros(1, 6, 1, 8)
    with pytest.raises(NworError, match="first_block: got 1, expected 0 without a block table"):
        select_blocks(query, own, own, count, 2, out=ids, first_block=1)
    with pytest.raises(NworError, match="block_table: got a tensor without out"):
        select_blocks(query, store, store, count, 2, block_table=table)
    apart = torch.zeros(6, 4, 1, 8)[:, :2]
    with pytest.raises(NworError, match="kmax: got strides"):
        select_blocks(query, apart, apart, count, 2, out=ids, block_table=table)
