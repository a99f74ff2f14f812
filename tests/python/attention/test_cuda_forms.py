"""Forms of a launch that change when things happen on the device, and never a bit, on CUDA.

One CTA or two on an SM, running outputs in shared memory or brought by the ring, the prefix read
before or after the launch ahead has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from nwor_specpv import PartialView, merge_rows, verify_attention, verify_plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

PAGE = 16
TURNS = 40


@dataclass
class Batch:
    """Requests over pages that they share, in any order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    table: torch.Tensor
    lens: torch.Tensor
    rows: int
    view: PartialView | None = None

    @property
    def starts(self) -> torch.Tensor:
        count = self.lens.shape[0] + 1
        return self.rows * torch.arange(count, dtype=torch.int32, device="cuda")

    def plan(self) -> torch.Tensor:
        where = (self.query, self.caches[0], self.table, self.lens, self.starts)
        return verify_plan(*where, view=self.view, max_rows=self.rows)

    def run(self, query: torch.Tensor | None = None, **options) -> torch.Tensor:
        query = self.query if query is None else query
        where = (*self.caches, self.table, self.lens, self.starts, None, query.shape[2] ** -0.5)
        options = {"view": self.view, "max_rows": self.rows, **options}
        return verify_attention(query, self.key, self.value, *where, route="cuda", **options)

    def only(self, request: int) -> Batch:
        own = slice(request * self.rows, (request + 1) * self.rows)
        one = slice(request, request + 1)
        tensors = {name: getattr(self, name)[own] for name in ("query", "key", "value")}
        return replace(self, table=self.table[one], lens=self.lens[one], **tensors)

    def reference(self, request: int) -> torch.Tensor:
        """Of one request, in float64."""
        one, length = self.only(request), int(self.lens[request])
        at = torch.arange(length, device="cuda")
        page = one.table[0, at // PAGE].long()
        group = one.query.shape[1] // one.key.shape[1]
        seen = torch.ones(self.rows, length + self.rows, dtype=torch.bool, device="cuda")
        seen = seen.tril(length)
        parts = []
        for own, cache in zip((one.key, one.value), self.caches, strict=True):
            tokens = torch.cat([cache[page, at % PAGE], own]).double()
            parts.append(tokens.repeat_interleave(group, 1))
        keys, values = parts
        scores = torch.einsum("rhd,thd->hrt", one.query.double(), keys) * keys.shape[2] ** -0.5
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        return torch.einsum("hrt,thd->rhd", weights, values)


def make_batch(
    lens: list[int],
    rows: int,
    *,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    pages: int = 512,
    columns: int = 0,
    seed: int = 1,
) -> Batch:
    generator = torch.Generator("cuda").manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    columns = columns or math.ceil(max(lens) / PAGE)
    table = torch.randint(pages, (len(lens), columns), generator=generator, device="cuda")
    total = len(lens) * rows
    return Batch(
        draw(total, heads, head_dim),
        draw(total, kv_heads, head_dim),
        draw(total, kv_heads, head_dim),
        (draw(pages, PAGE, kv_heads, head_dim), draw(pages, PAGE, kv_heads, head_dim)),
        table.int(),
        torch.tensor(lens, dtype=torch.int32, device="cuda"),
        rows,
    )


def wide(batch: Batch) -> Batch:
    """The same over a table with room for many more tokens, which hides how short requests are."""
    room = batch.table.new_full((batch.table.shape[0], 1 << 14), 1 << 30)
    return replace(batch, table=torch.cat([batch.table, room], 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [0, 1, 63, 400, 1024, 4608, 5000])
def test_sixteen_rows_of_a_short_request(length: int, dtype: torch.dtype) -> None:
    for rows in (9, 16):
        batch = make_batch([length], rows, dtype=dtype, columns=1 + length // PAGE)
        out = batch.run()
        assert (out.double() - batch.reference(0)).abs().max() < 3e-2
        assert torch.equal(out, wide(batch).run())
        assert torch.equal(out, batch.run(plan=batch.plan()))


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("rows", [9, 16])
def test_whole_requests_give_what_they_give_alone(rows: int, head_dim: int) -> None:
    """Two KV heads of many requests: nearly every CTA computes whole requests, of up to 8 groups
    of splits, whose running output is in a slot."""
    lens = [7000, 1700, 3100, 1030, 410, 64, 2305, 12000, 769, 1537] * 60
    batch = make_batch(lens, rows, heads=8, kv_heads=2, head_dim=head_dim)
    out = batch.run()
    for request in range(10):
        own = slice(request * rows, (request + 1) * rows)
        alone = batch.only(request)
        assert torch.equal(out[own], alone.run()), lens[request]
        assert (out[own].double() - alone.reference(0)).abs().max() < 3e-2
    for _ in range(TURNS):
        assert torch.equal(batch.run(), out)


def with_view(batch: Batch) -> Batch:
    """Every other page of each request, for every head in an order of its own."""
    kv_heads, blocks = batch.key.shape[1], batch.table.shape[1] // 2
    lists = torch.stack([batch.table[:, torch.randperm(blocks * 2)[:blocks].sort().values.cuda()]
                         for _ in range(kv_heads)], 1)  # fmt: skip
    counts = batch.lens.new_full(batch.lens.shape, blocks)
    view = PartialView(lists.contiguous(), counts, counts * PAGE - 5, PAGE)
    return replace(batch, view=view)


def chain(batch: Batch, weight: torch.Tensor, *, prefix_ready: bool) -> torch.Tensor:
    """Layers behind each other: each one's Q, and its rows in flight, come from the one before."""
    plan, query = batch.plan(), batch.query
    torch.cuda.synchronize()
    for _ in range(TURNS):
        query = (query.flatten(0, 1) @ weight).view_as(query)  # the launch ahead
        batch.key.copy_(query[:, : batch.key.shape[1]])
        out = batch.run(query, plan=plan, prefix_ready=prefix_ready)
        query = batch.run(out, plan=plan, prefix_ready=prefix_ready)  # behind attention itself
    return query


@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize(
    ("lens", "rows"),
    [
        ([700], 1),
        ([4608], 8),
        ([4608], 16),
        ([5000, 90, 2000], 5),
        ([3000] * 40, 16),
        ([3000, 800], 64),
    ],
)
def test_a_prefix_read_early_changes_nothing(lens: list[int], rows: int, head_dim: int) -> None:
    weight = (torch.randn(head_dim, head_dim, device="cuda") * 8 * head_dim**-0.5).bfloat16()
    for change in (lambda batch: batch, with_view):
        batch = change(make_batch(lens, rows, head_dim=head_dim))
        key = batch.key.clone()
        expected = chain(batch, weight, prefix_ready=False)
        assert not expected.isnan().any()
        batch.key.copy_(key)
        assert torch.equal(chain(batch, weight, prefix_ready=True), expected)


def replayed(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(3):
        out.zero_()
        graph.replay()
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("rows", [1, 16])
def test_a_prefix_read_early_in_a_graph_that_writes_the_cache_before(rows: int) -> None:
    """A step: the plan, the cache's last write, the first layer, then layers that read early."""
    batch = make_batch([4608, 1200], rows)
    plan, fresh = batch.plan(), [cache.clone() for cache in batch.caches]
    for cache in fresh:
        cache.mul_(-0.5)

    def step(*, prefix_ready: bool) -> torch.Tensor:
        verify_plan(
            batch.query, batch.caches[0], batch.table, batch.lens, batch.starts,
            max_rows=rows, plan=plan,
        )  # fmt: skip
        for cache, new in zip(batch.caches, fresh, strict=True):
            cache.copy_(new)
        query = batch.run(plan=plan)
        for _ in range(8):
            query = batch.run(query * 1.5, plan=plan, prefix_ready=prefix_ready)
        return query

    expected = replayed(lambda: step(prefix_ready=False))
    assert torch.equal(replayed(lambda: step(prefix_ready=True)), expected)


def test_without_a_plan_nothing_is_read_early() -> None:
    """The planner is the launch ahead then."""
    batch = make_batch([4608, 30], 8)
    expected = batch.run()
    for _ in range(TURNS):
        assert torch.equal(batch.run(prefix_ready=True), expected)


@pytest.mark.parametrize("rows", [1, 5])
def test_merging_rows_behind_attention_may_start_early(rows: int) -> None:
    batch = make_batch([3000, 100, 0], rows)

    def merged(behind_verify: bool) -> torch.Tensor:
        out, lse = batch.run(return_lse=True)
        return merge_rows(
            batch.query, batch.key, batch.value, out, lse, batch.starts, None, 0.1,
            behind_verify=behind_verify,
        )  # fmt: skip

    expected = merged(False)
    for _ in range(TURNS):
        assert torch.equal(merged(True), expected)
