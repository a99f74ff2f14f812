"""The rows of a growing tree in the attention of a drafting head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from nwor_specpv import verify_attention
from nwor_specpv.vllm.backend.caches import plain_query, scaled_caches


@dataclass(frozen=True)
class TreeLevel:
    """Stands where vLLM expects attention metadata. Every request has `num_rows` rows. They see
    the head's cache and one another, and are not written to it."""

    block_table: torch.Tensor  # [B, pages] int32
    prefix_lens: torch.Tensor  # [B] int32
    query_start: torch.Tensor  # [B + 1] int32
    mask: torch.Tensor  # [B * num_rows, 1] int64
    num_rows: int

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
        """Attention of one layer; `output` has a row for each of `query`."""
        caches, scales = scaled_caches(layer, kv_cache)
        verify_attention(
            plain_query(layer, query, output.dtype),
            key,
            value,
            *caches,
            self.block_table,
            self.prefix_lens,
            self.query_start,
            self.mask,
            impl.scale,
            softcap=impl.logits_soft_cap,
            out=output,
            max_rows=self.num_rows,
            **scales,
        )
        return output
