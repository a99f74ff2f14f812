"""Summaries, chosen blocks and views of the requests that have a row here.

A row belongs to one request for as long as its host wants. Lengths, decisions and views are device
tensors, so a step's launches are the same whatever its requests do: one captured graph serves every
mix. Rows keep what must outlive a step: how many blocks are summarised, and the length at which
blocks were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nwor_specpv import PartialView, SpecPVConfig, block_summaries, build_view, select_blocks
from nwor_specpv.errors import NworError


@dataclass(frozen=True)
class ViewBatch:
    """The requests of one step, [B] int32 each but for the table. Row -1 takes no part."""

    block_table: torch.Tensor  # [B, pages] int32
    rows: torch.Tensor
    lens: torch.Tensor  # tokens in the cache, all of them final
    select: torch.Tensor  # 1: summaries are completed and blocks chosen in this step


class ViewStore:
    """Views of up to `max_requests` requests over the caches of every layer.

    A step: `begin`, then per layer `refresh_layer`; `build` before whoever reads `view(layer)`;
    `end` when no layer failed. Thread-safety: none.
    """

    def __init__(
        self,
        config: SpecPVConfig,
        key_caches: Sequence[torch.Tensor],
        *,
        max_requests: int,
        max_batch: int,
        max_tokens: int,
        max_rows: int,
        key_scales: Sequence[torch.Tensor] = (),
        dtype: torch.dtype | None = None,
    ) -> None:
        """`key_scales`, `dtype`: of quantised caches: what K is multiplied by, layer by layer, and
        the dtype of summaries."""
        first = key_caches[0]
        for cache in key_caches:
            if cache.shape != first.shape or cache.dtype != first.dtype:
                raise NworError(
                    f"key_caches: a layer has {list(cache.shape)} {cache.dtype}, but the first one "
                    f"has {list(first.shape)} {first.dtype}; serve this model without enable_specpv"
                )
        self.page_size, num_heads, head_size = first.shape[1:]
        config.validate_for(self.page_size, max_rows, max_tokens)
        self.config = config
        self.budget = budget = config.budget(max_rows)
        self.key_caches = list(key_caches)
        self._key_scales = list(key_scales) or [None] * len(key_caches)
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        layers, device = len(key_caches), first.device
        self._retrieves = budget.retrieval_blocks > 0
        self._pages = -(-max_tokens // self.page_size) if self._retrieves else 0
        page_blocks = self.page_size // budget.block_size

        def ints(*shape: int, value: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        # By pages, as the cache: however many requests there are and however long they may become.
        self.kmax = torch.zeros(
            (layers, first.shape[0] if self._retrieves else 0, page_blocks, num_heads, head_size),
            dtype=dtype or first.dtype,
            device=device,
        )
        self.kmin = torch.zeros_like(self.kmax)
        self.ids = ints(layers, max_requests, num_heads, budget.retrieval_blocks, value=-1)
        self._blocks = ints(layers * max_batch * num_heads * budget.max_view_blocks, value=-1)
        self._shape = (layers, num_heads, budget.max_view_blocks)
        self.num_blocks = ints(max_batch, value=-1)
        self.view_lens = ints(max_batch, value=0)
        self._scores = torch.zeros(
            max_batch * num_heads * self._pages * page_blocks, dtype=torch.float32, device=device
        )
        # By row, and a last place for requests without one.
        self._done = ints(max_requests + 1, value=0)  # blocks summarised
        self._anchor = ints(max_requests + 1, value=0)  # length at the last choice
        # Of the step that was begun last, by request.
        self._rows = ints(max_batch, value=-1)
        self._candidates = ints(max_batch, value=-1)
        self._start = ints(max_batch, value=budget.sink_blocks * budget.block_size)
        self._end = ints(max_batch, value=0)
        self._step_done = ints(max_batch, value=0)
        self._step_anchor = ints(max_batch, value=0)
        self._partial = ints(max_batch, value=0)
        self._lens = ints(max_batch, value=0)
        self._table: torch.Tensor | None = None
        self._free = list(range(max_requests))

    # ---- rows -----------------------------------------------------------------------------------

    def open(self) -> int | None:
        """A row of its own for a request, or None when all are taken."""
        if not self._free:
            return None
        row = self._free[-1]
        self._done[row] = 0
        self._anchor[row] = 0
        return self._free.pop()

    @property
    def has_room(self) -> bool:
        """Whether `open` has a row to give."""
        return bool(self._free)

    def close(self, row: int) -> None:
        self._free.append(row)

    @property
    def bytes(self) -> int:
        """Memory held on the device."""
        held = (self.kmax, self.kmin, self.ids, self._blocks, self._scores)
        return sum(tensor.nbytes for tensor in held)

    @property
    def anchors(self) -> torch.Tensor:
        """Lengths at which rows have chosen, and a last place for requests without a row."""
        return self._anchor

    def rows(self, count: int) -> torch.Tensor:
        """The rows of the step's requests, -1: none."""
        return self._rows[:count]

    def lens(self, count: int) -> torch.Tensor:
        """The lengths of the step's requests."""
        return self._lens[:count]

    def places(self, count: int) -> torch.Tensor:
        """`rows`, with the last place instead of -1."""
        rows = self._rows[:count].long()
        return torch.where(rows >= 0, rows, self.max_requests)

    # ---- a step ---------------------------------------------------------------------------------

    def begin(
        self, batch: ViewBatch, partial: torch.Tensor | None = None, *, selects: bool = True
    ) -> None:
        """Tells the device what the requests do. `partial` [B]: 1: sees the view; default: all.

        A request that selects is anchored at its length; `build` uses the anchor of the choice its
        row has by then. `selects`: False if the host knows that nobody does, which saves launches.
        """
        budget, count = self.budget, batch.rows.shape[0]
        self._table = batch.block_table
        self._rows[:count] = batch.rows
        self._lens[:count] = batch.lens
        self._partial[:count] = 1 if partial is None else partial
        self._partial[:count].masked_fill_(batch.rows < 0, 0)
        rows = self.places(count)
        if not selects:
            self._step_anchor[:count] = self._anchor[rows]
            return
        chosen = (batch.select != 0) & (batch.rows >= 0)
        window = (batch.lens // budget.block_size - budget.window_blocks).clamp(
            min=budget.sink_blocks
        )
        self._candidates[:count] = torch.where(chosen, window - budget.sink_blocks, -1)
        self._end[:count] = torch.where(chosen, window * budget.block_size, 0)
        self._step_done[:count] = self._done[rows]
        self._step_anchor[:count] = torch.where(chosen, batch.lens, self._anchor[rows])

    def refresh_layer(
        self, layer: int, query: torch.Tensor, query_rows: torch.Tensor | None = None
    ) -> None:
        """Completes summaries and chooses blocks for the requests that select.

        query [B, rows, Hq, D] after RoPE; query_rows [B, 2] int32: which of the rows count.
        """
        if not self._retrieves:
            return
        count = query.shape[0]
        config, table = self.config, self._table[:, : self._pages]
        block_summaries(
            self.key_caches[layer],
            table,
            self._start[:count],
            self._end[:count],
            self.kmax[layer],
            self.kmin[layer],
            self.budget.block_size,
            self._key_scales[layer],
            self._step_done[:count],
            by_pages=True,
        )
        score = config.specpv_score
        if score == "auto":
            score = "quest" if config.specpv_selector == "quest" else "specpv"
        select_blocks(
            query,
            self.kmax[layer],
            self.kmin[layer],
            self._candidates[:count],
            self.budget.retrieval_blocks,
            score,
            config.specpv_query_reduce,
            config.specpv_group_reduce,
            config.specpv_selection,
            query_rows=query_rows,
            out=self.ids[layer],
            scores=self._scores,
            rows=self._rows[:count],
            block_table=table,
            first_block=self.budget.sink_blocks,
        )

    def build(self, count: int, layer: int | None = None) -> None:
        """Views of one layer, or of all of them, from what their rows have chosen."""
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        build_view(
            self.ids[layers],
            self._table,
            self._step_anchor[:count],
            self._lens[:count],
            self._partial[:count],
            self.blocks(count)[layers],
            self.num_blocks[:count],
            self.view_lens[:count],
            page_size=self.page_size,
            block_size=self.budget.block_size,
            sink_blocks=self.budget.sink_blocks,
            window_blocks=self.budget.window_blocks,
            rows=self._rows[:count],
        )

    def end(self, count: int) -> None:
        """What was chosen in this step stands: rows remember it. Without it nothing is remembered,
        and what was summarised is summarised again."""
        places, candidates = self.places(count), self._candidates[:count]
        done = torch.maximum(self._step_done[:count], candidates)
        self._done.index_copy_(0, places, done)
        self._anchor.index_copy_(0, places, self._step_anchor[:count])

    def blocks(self, count: int) -> torch.Tensor:
        """[L, count, Hkv, most blocks]: the lists of a batch of `count` requests."""
        layers, heads, most = self._shape
        return self._blocks[: layers * count * heads * most].view(layers, count, heads, most)

    def view(self, layer: int, count: int) -> PartialView:
        """The view of a layer, as verify attention takes it."""
        return PartialView(
            self.blocks(count)[layer],
            self.num_blocks[:count],
            self.view_lens[:count],
            self.budget.block_size,
        )
