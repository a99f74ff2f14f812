"""What partial verification changes in a step of many layers: its attention, and its commit.

Part of `nwor-specpv bench retrieval`. Attention: every layer's verify attention over whole
contexts, and over per-head views of the default budget with everything a partial step adds (views
of all layers in one launch). Layers share a few caches in turn, each far larger than the L2 cache.
Commit: accepted rows of all layers, alone and with compact views to feed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from nwor_specpv.layouts import cache_views
from nwor_specpv.ops.attention import PartialView, verify_attention, verify_plan
from nwor_specpv.ops.kv import CommitTail, commit
from nwor_specpv.ops.retrieval import build_view

from .timing import Timing, capture, time_calls, time_graphs

BLOCK, PAGE, SINK, WINDOW, BUDGET = 16, 16, 2, 8, 256
ALONE = "alone"
ACCEPTED = 4  # of a request's drafts
CACHED = 124  # tokens of a request that are in the cache before
POISON = 55.0  # where a check expects nothing
GOALS = {
    ("step", 8, 32768): "goal at 8 x 32768: full / partial at least 5",
    ("step", 8, 131072): "goal at 8 x 131072: full / partial at least 20",
}


@dataclass(frozen=True)
class Shape:
    requests: int
    tokens: int
    rows: int = 8
    layers: int = 32
    caches: int = 4  # that the layers share in turn
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.requests} x {self.tokens}, {self.rows} rows, {self.layers} layers, "
            f"{self.heads}/{self.kv_heads} heads, D {self.dim}, {name}"
        )

    def ints(self, values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def noise(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=self.dtype, device=self.device)


def build_views(
    ids: torch.Tensor,
    table: torch.Tensor,
    lens: torch.Tensor,
    partial: torch.Tensor,
    *written: torch.Tensor,
) -> None:
    """Views of contexts that are verified to their ends, with the default sink and window."""
    sizes = {"page_size": PAGE, "block_size": BLOCK, "sink_blocks": SINK, "window_blocks": WINDOW}
    build_view(ids, table, lens, lens, partial, *written, **sizes)


class Step:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        pages = shape.tokens // PAGE
        total = shape.requests * pages
        order = torch.randperm(total, device=shape.device).int()
        self.table = order.reshape(shape.requests, pages)
        self.caches = [
            cache_views(shape.noise(total, shape.kv_heads, PAGE, 2 * shape.dim), "packed")
            for _ in range(min(shape.caches, shape.layers))
        ]
        rows = shape.requests * shape.rows
        self.query = shape.noise(rows, shape.heads, shape.dim)
        self.key, self.value = shape.noise(2, rows, shape.kv_heads, shape.dim)
        self.out = torch.empty_like(self.query)
        self.lens = shape.ints([shape.tokens] * shape.requests)
        self.start = shape.ints(list(range(0, rows + 1, shape.rows)))
        candidates = pages * PAGE // BLOCK - SINK - WINDOW
        self.k = min(BUDGET, candidates)
        lists = (shape.layers, shape.requests, shape.kv_heads)
        scores = torch.rand(*lists, candidates, device=shape.device)
        self.ids = scores.topk(self.k, -1).indices.sort(-1).values.int().contiguous()
        del scores
        room = SINK + self.k + WINDOW + 2
        self.blocks = torch.zeros(*lists, room, dtype=torch.int32, device=shape.device)
        self.num_blocks, self.view_lens = torch.zeros_like(self.lens), torch.zeros_like(self.lens)
        self.partial = torch.ones_like(self.lens)
        self.build()
        self.plans = {
            viewed: self.plan(self.view(0) if viewed else None) for viewed in (False, True)
        }

    def build(self) -> None:
        lists = self.ids, self.table, self.lens, self.partial
        build_views(*lists, self.blocks, self.num_blocks, self.view_lens)

    def view(self, layer: int) -> PartialView:
        return PartialView(self.blocks[layer], self.num_blocks, self.view_lens, BLOCK)

    def plan(self, view: PartialView | None, plan: torch.Tensor | None = None) -> torch.Tensor:
        given = self.query, self.caches[0][0], self.table, self.lens, self.start
        return verify_plan(*given, view=view, plan=plan)

    def attend(self, layer: int, view: PartialView | None) -> torch.Tensor:
        return verify_attention(
            self.query,
            self.key,
            self.value,
            *self.caches[layer % len(self.caches)],
            self.table,
            self.lens,
            self.start,
            None,
            self.shape.dim**-0.5,
            view=view,
            out=self.out,
            plan=self.plans[view is not None],
        )

    def full(self) -> None:
        self.plan(None, self.plans[False])
        for layer in range(self.shape.layers):
            self.attend(layer, None)

    def viewed(self) -> None:
        self.build()
        self.plan(self.view(0), self.plans[True])
        for layer in range(self.shape.layers):
            self.attend(layer, self.view(layer))

    def check(self) -> float:
        """The largest error that either form leaves in a head of the last layer."""
        parts = PAGE // BLOCK
        whole = self.table[0, :, None] * parts + torch.arange(parts, device=self.shape.device)
        full = self._error(self.full, whole.flatten())
        self.num_blocks.fill_(-1)
        self.build()
        viewed = SINK + self.k + WINDOW
        if self.num_blocks.tolist() != [viewed] * self.shape.requests:
            got = self.num_blocks.tolist()
            raise AssertionError(f"{self.shape}: views of {got} blocks, not of {viewed}")
        return max(full, self._error(self.viewed, self.blocks[-1, 0, 0, :viewed]))

    def _error(self, run: Callable[[], None], blocks: torch.Tensor) -> float:
        """What `run` leaves in the first head of the first request, against float64."""
        shape, head = self.shape, 0
        self.out.fill_(torch.nan)
        run()
        got = self.out[: shape.rows, 0].double()
        keys, values = self.caches[(shape.layers - 1) % len(self.caches)]
        blocks = blocks.long()
        parts = PAGE // BLOCK
        seen = [
            side[blocks // parts, :, head]
            .unflatten(1, (parts, BLOCK))[
                torch.arange(len(blocks), device=shape.device), blocks % parts
            ]
            .flatten(0, 1)
            .double()
            for side in (keys, values)
        ]
        own = [side[: shape.rows, head].double() for side in (self.key, self.value)]
        scores = (
            self.query[: shape.rows, 0].double() @ torch.cat([seen[0], own[0]]).T * shape.dim**-0.5
        )
        causal = torch.ones(shape.rows, shape.rows, device=shape.device).tril().bool()
        visible = torch.ones(shape.rows, len(seen[0]), device=shape.device).bool()
        scores = scores.masked_fill(~torch.cat([visible, causal], 1), -torch.inf)
        error = float((scores.softmax(-1) @ torch.cat([seen[1], own[1]]) - got).abs().max())
        if not error <= 2e-2:
            raise AssertionError(f"{shape}: an output is off by {error}")
        return error


class Commits:
    """One commit of all layers, without and with compact views to feed."""

    forms = (ALONE, "compact views")

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        pages = -(-(CACHED + shape.rows) // PAGE)
        total = shape.requests * pages
        self.table = torch.randperm(total, device=shape.device).int()
        self.table = self.table.reshape(shape.requests, pages)
        memory = shape.noise(shape.layers, total, shape.kv_heads, PAGE, 2 * shape.dim)
        self.keys, self.values = map(
            list, zip(*(cache_views(layer, "packed") for layer in memory), strict=True)
        )
        rows = shape.requests * shape.rows
        self.staged = shape.noise(2, shape.layers, rows, shape.kv_heads, shape.dim)
        path = torch.full((shape.requests, shape.rows - 1), -1)
        for b in range(shape.requests):
            path[b, :ACCEPTED] = b * shape.rows + 1 + torch.arange(ACCEPTED)
        self.path = path.int().to(shape.device)
        self.counts = shape.ints([ACCEPTED] * shape.requests)
        self.slots = self._slots()
        self.status = torch.zeros(8, dtype=torch.int64, device=shape.device)
        views = (2, shape.layers, shape.requests, shape.kv_heads, 64, shape.dim)
        self.views = torch.zeros(views, dtype=shape.dtype, device=shape.device)
        self.begin, self.held = torch.zeros_like(self.counts), torch.zeros_like(self.counts)
        self.roots = torch.zeros(shape.requests, dtype=torch.int64, device=shape.device)

    def _slots(self) -> torch.Tensor:
        """Where the accepted rows go, -1 for the others."""
        slots = torch.full((self.shape.requests, self.shape.rows - 1), -1)
        for b, pages in enumerate(self.table.tolist()):
            for i, token in enumerate(range(CACHED, CACHED + ACCEPTED)):
                slots[b, i] = pages[token // PAGE] * PAGE + token % PAGE
        return slots.to(self.shape.device)

    def run(self, form: str) -> None:
        tail = None
        if form == "compact views":
            tail = CommitTail(*self.views, self.begin, self.roots, self.held)
        given = self.keys, self.values, self.path, self.counts, self.slots, self.status
        commit(*self.staged, *given, tail=tail)

    def check(self) -> None:
        for form in self.forms:
            self._poison()
            self.run(form)
            wrong = self._wrong(form)
            if wrong:
                raise AssertionError(f"{self.shape}: commit {form}: {wrong}")

    def _poison(self) -> None:
        """All that a commit may write, so that nothing stands there from the one before."""
        page, offset = self._pages()
        for side in (*self.keys, *self.values):
            side[page, offset] = torch.nan
        self.views.fill_(POISON)

    def _wrong(self, form: str) -> str:
        """What a commit has left wrong, bit for bit."""
        if int(self.status[0]) != 0:
            return f"status {self.status.tolist()}"
        page, offset = self._pages()
        caches = self.keys, self.values
        accepted = self.staged[:, :, self.path[:, :ACCEPTED].long()]  # [2, L, B, ACCEPTED, Hkv, D]
        for side, rows in zip(caches, accepted, strict=True):
            if not torch.equal(torch.stack([layer[page, offset] for layer in side]), rows):
                return "rows differ"
        expected = torch.full_like(self.views, POISON)
        if form == "compact views":
            roots = torch.stack([torch.stack([layer[0, 0] for layer in side]) for side in caches])
            expected[:, :, :, :, 0] = roots[:, :, None]
            expected[:, :, :, :, 1 : 1 + ACCEPTED] = accepted.transpose(3, 4)
        return "" if torch.equal(self.views, expected) else "views differ"

    def _pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        accepted = self.slots[:, :ACCEPTED]
        return accepted // PAGE, accepted % PAGE


def _time(
    variants: dict[str, Callable[[], None]], calls: int, device: str, replays: int
) -> dict[str, Timing]:
    if device == "cpu":
        return time_calls(variants, replays)
    graphs = {
        name: capture(lambda run=run: [run() for _ in range(calls)])
        for name, run in variants.items()
    }
    return time_graphs(graphs, dict.fromkeys(variants, calls), replays, rehearse=calls > 1)


def bench_step(shape: Shape, replays: int) -> dict[str, Any]:
    step = Step(shape)
    error = step.check()
    timings = _time({"full": step.full, "partial": step.viewed}, 1, shape.device, replays)
    us = {name: timing.median_us for name, timing in timings.items()}
    return {
        "what": "step",
        "case": str(shape),
        "requests": shape.requests,
        "tokens": shape.tokens,
        "us": us,
        "spread_us": {name: timing.spread_us for name, timing in timings.items()},
        "speedup": us["full"] / us["partial"],
        "error": error,
        "goal": GOALS.get(("step", shape.requests, shape.tokens), ""),
    }


def bench_commit(shape: Shape, replays: int) -> dict[str, Any]:
    commits = Commits(shape)
    commits.check()
    variants = {form: (lambda form=form: commits.run(form)) for form in commits.forms}
    timings = _time(variants, 12, shape.device, replays)
    us = {name: timing.median_us for name, timing in timings.items()}
    return {
        "what": "commit",
        "case": str(shape),
        "requests": shape.requests,
        "tokens": shape.requests * ACCEPTED,
        "us": us,
        "spread_us": {name: timing.spread_us for name, timing in timings.items()},
        "relative": {form: us[form] / us[ALONE] for form in commits.forms},
        "goal": "",
    }
