"""Verification steps of fixed shapes: on CUDA captured once and replayed.

Rows are padded to a size of a short list. Tokens, positions, slots, masks, lengths, tables and
views are device data in places that stay, so one graph serves every step of its shape, whatever its
requests hold. The first step of a shape runs as it is, the second one captures it. On the CPU there
is nothing to capture, and the padded steps run as they are.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nwor_specpv import Interceptor, NworError, RoundPlan

from .layers.attention import Step
from .packed_tensors import num_words, split_memory
from .views.views import Views

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MOST_ROWS = _SIZES[-1]  # a step of more is compute-bound, and launches hide behind the work
_MOST_GRAPHS = 32

Forward = Callable[[Step], tuple[torch.Tensor, torch.Tensor | None]]


class Shape(NamedTuple):
    """All that a graph depends on beside the contents of its buffers."""

    rows: int
    longest: int  # rows of one request
    places: int
    pages: int
    tree: bool
    refreshing: bool
    features: tuple[int, ...]


@dataclass
class _Fixed:
    """A step whose tensors stay where they are."""

    step: Step
    host: dict[str, torch.Tensor]
    small: tuple[torch.Tensor, torch.Tensor]  # all but the table, on the host and on the device
    graph: torch.cuda.CUDAGraph | None = None
    refused: bool = False
    runs: int = 0
    out: tuple[torch.Tensor, torch.Tensor | None] | None = None


class StepGraphs:
    """The fixed steps of one cache. Not thread-safe."""

    def __init__(
        self, device: torch.device, caches: list, interceptor: Interceptor, staging_rows: int
    ) -> None:
        self._device, self._caches, self._interceptor = device, caches, interceptor
        self._staging_rows = staging_rows  # drafts that a round may have
        self._fixed: OrderedDict[tuple[Shape, int], _Fixed] = OrderedDict()
        self._on_gpu = device.type == "cuda"
        self._pool = None
        self.replays = 0
        self.eager: Counter[str] = Counter()  # why steps ran without a graph
        self.problem: str | None = None  # the last capture that failed

    def prepare(self, step: Step, features: tuple[int, ...], forward: Forward) -> _Fixed | None:
        """The place for a step of this shape; None: it runs as it is. REQUIRES: no open round."""
        rows, longest = len(step.tokens), step.max_rows
        if rows > MOST_ROWS:
            self.eager["rows"] += 1
            return None
        shape = Shape(
            _up(rows),
            _up(longest),
            len(step.prefix_lens),
            1 << (step.block_table.shape[1] - 1).bit_length(),
            step.tree_mask is not None,
            step.refreshing,
            features,
        )
        key = (shape, id(step.partial))
        if key not in self._fixed:
            self._fixed[key] = self._make(shape, step.partial)
            if len(self._fixed) > _MOST_GRAPHS:
                self._fixed.popitem(last=False)
        self._fixed.move_to_end(key)
        fixed = self._fixed[key]
        if self._on_gpu and fixed.runs and fixed.graph is None and not fixed.refused:
            self._capture(fixed, shape, forward)
        return fixed

    def run(
        self, fixed: _Fixed, step: Step, forward: Forward
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of the rows asked for and features. REQUIRES: the step's round is open."""
        _fill(fixed, step)
        fixed.runs += 1
        if fixed.graph is None:
            self.eager[self._why(fixed)] += 1
            fixed.step.plans.clear()
            logits, features = forward(fixed.step)
        else:
            fixed.graph.replay()
            self.replays += 1
            self._interceptor.note_replay()
            if step.refreshing:
                step.partial.store.mark_refreshed()
            logits, features = fixed.out
        rows = len(step.tokens)
        if step.logit_rows is None:
            logits = logits[:rows]
        else:
            logits = logits[step.logit_rows.to(self._device)]
        return logits, None if features is None else features[:rows]

    def _why(self, fixed: _Fixed) -> str:
        if not self._on_gpu:
            return "cpu"
        return "refused" if fixed.refused else "first"

    def _make(self, shape: Shape, partial: Views | None) -> _Fixed:
        rows, places = shape.rows, shape.places
        words = -(-shape.longest // 64) if shape.tree else 0
        sizes = {
            "tokens": (torch.int64, (rows,)),
            "positions": (torch.int64, (rows,)),
            "slots": (torch.int64, (rows,)),
            "tree_mask": (torch.int64, (rows, words)),
            "prefix_lens": (torch.int32, (places,)),
            "query_start": (torch.int32, (places + 1,)),
            "tree_rows": (torch.int32, (places, 2)),
        }
        count = num_words(sizes)
        small = (
            torch.zeros(count, dtype=torch.int64, pin_memory=self._on_gpu),
            torch.zeros(count, dtype=torch.int64, device=self._device),
        )
        parts = [split_memory(memory, sizes) for memory in small]
        if not shape.tree:
            for side in parts:
                side["tree_mask"] = None
        table = torch.zeros(places, shape.pages, dtype=torch.int32, device=self._device)
        step = Step(
            **parts[1],
            block_table=table,
            max_rows=shape.longest,
            caches=self._caches,
            partial=partial,
            refreshing=shape.refreshing,
        )
        return _Fixed(step, parts[0], small)

    def drop(self, partial: Views) -> None:
        """These views are used no more."""
        for key in [key for key in self._fixed if key[1] == id(partial)]:
            del self._fixed[key]

    def _capture(self, fixed: _Fixed, shape: Shape, forward: Forward) -> None:
        """Records the step; nothing of it runs. What cannot be captured goes on without a graph."""
        # How rows belong to requests is read from tables at every replay; here only they count. A
        # round with more drafts than are staged would be captured as one that stages none.
        drafts = min(shape.rows - 1, self._staging_rows)
        self._interceptor.begin(RoundPlan([shape.rows], [drafts]), capture=True)
        graph = torch.cuda.CUDAGraph()
        fixed.step.plans.clear()
        collecting = gc.isenabled()
        gc.disable()  # a tensor of another graph that goes away now would spoil this one
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                fixed.out = forward(fixed.step)
        except (RuntimeError, NworError) as error:
            fixed.refused, fixed.out = True, None
            fixed.step.plans.clear()
            self.problem = str(error).strip().splitlines()[0]
            return
        finally:
            if collecting:
                gc.enable()
            self._interceptor.abort()
        fixed.graph = graph
        if self._pool is None:
            self._pool = graph.pool()


def _fill(fixed: _Fixed, step: Step) -> None:
    host = fixed.host
    rows = len(step.tokens)
    for name, padding in (("tokens", 0), ("positions", 0), ("slots", -1)):
        host[name][:rows] = getattr(step, name)
        host[name][rows:] = padding
    if step.tree_mask is not None:
        host["tree_mask"].zero_()
        host["tree_mask"][:rows, : step.tree_mask.shape[1]] = step.tree_mask
    host["prefix_lens"].copy_(step.prefix_lens)
    host["query_start"].copy_(step.query_start)
    if step.tree_rows is not None:
        host["tree_rows"].copy_(step.tree_rows)
    fixed.small[1].copy_(fixed.small[0], non_blocking=True)
    pages = step.block_table.shape[1]
    fixed.step.block_table[:, :pages].copy_(step.block_table)


def _up(count: int) -> int:
    return next(size for size in _SIZES if size >= count)
