"""The target model over a view of its context: what its attention layers need for one pass.

Rows see the request's view, the tail of drafts that earlier passes have made, and one
another. Nothing of them is written to the engine's cache: vLLM is given no slots, and K/V goes to
the tail.

With several ranks a pass goes through the model's collectives whatever becomes of our part in it:
see `failures`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nwor_specpv import merge_rows, verify_attention, verify_plan
from nwor_specpv.vllm.backend.caches import plain_query, scaled_caches

from .tail import Tail
from .views import ViewStore


@dataclass
class PartialPass:
    """Stands where vLLM expects attention metadata. Every request has `num_rows` rows."""

    store: ViewStore
    tail: Tail
    layer_index: dict[str, int]
    block_table: torch.Tensor  # [B, pages] int32
    prefix_lens: torch.Tensor  # [B] int32, confirmed tokens
    tail_lens: torch.Tensor  # [B] int32
    query_start: torch.Tensor  # [B + 1] int32
    slots: torch.Tensor  # [B * num_rows] int64 in the tail, -1: not kept
    num_rows: int
    has_tail: bool
    select: bool  # the pass' queries choose the blocks, in the first pass of a proposal at least
    query_rows: torch.Tensor | None = None  # [B, 2] int32: rows that are no padding
    plan: torch.Tensor | None = None  # of all layers: their views have the same lengths
    planned: bool = False  # whether `plan` is that of these views already
    begun: bool = False  # whether a layer has run
    keeps_failure: bool = False  # other ranks run it, too: whoever fails goes on to its end
    failure: Exception | None = None

    @property
    def num_requests(self) -> int:
        return self.block_table.shape[0]

    def attend(
        self,
        impl: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of one layer; `output` has a row for each of `query`.

        With `keeps_failure` it does not raise: from the layer that failed on, `output` is zeros,
        and what the model says is of no use.
        """
        if not self.keeps_failure:
            return self._attend(impl, layer, query, key, value, kv_cache, output)
        if self.failure is None:
            try:
                return self._attend(impl, layer, query, key, value, kv_cache, output)
            except Exception as error:
                self.failure = error
        return output.zero_()

    def check(self) -> None:
        """Raises what has failed in the pass, once it is over."""
        if self.failure is not None:
            raise self.failure

    def _attend(
        self,
        impl: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        index, count = self.layer_index[layer.layer_name], self.num_requests
        num_rows = count * self.num_rows
        query, key, value = (tensor[:num_rows] for tensor in (query, key, value))
        query = plain_query(layer, query, key.dtype)
        if self.select:
            grouped = query.unflatten(0, (count, self.num_rows))
            self.store.refresh_layer(index, grouped, self.query_rows)
            self.store.build(count, index)
        self.tail.write(index, key, value, self.slots)
        (key_cache, value_cache), scales = scaled_caches(layer, kv_cache)
        view, out = self.store.view(index, count), output[:num_rows]
        where = (self.block_table, self.prefix_lens, self.query_start)
        if not self.planned:
            self.plan = verify_plan(
                query, key_cache, *where, view=view, max_rows=self.num_rows, plan=self.plan
            )
            self.planned = True
        seen = verify_attention(
            query,
            key,
            value,
            key_cache,
            value_cache,
            *where,
            None,
            scale=impl.scale,
            softcap=impl.logits_soft_cap,
            max_rows=self.num_rows,
            view=view,
            plan=self.plan,
            # A pass writes nothing that its layers read of the prefix, but for what comes right
            # before: the plan in the first layer, and the layer's view where it is chosen anew.
            prefix_ready=self.begun and not self.select,
            out=out,
            return_lse=self.has_tail,
            **scales,
        )
        self.begun = True
        if self.has_tail:
            merge_rows(
                query,
                self.tail.keys[index, :count].flatten(0, 1),
                self.tail.values[index, :count].flatten(0, 1),
                *seen,
                self.query_start,
                None,
                impl.scale,
                softcap=impl.logits_soft_cap,
                token_lens=self.tail_lens,
                behind_verify=True,  # views are read by our kernels only
                out=out,
            )
        return output
