"""What layers of the CUDA backend are told of a step: vLLM's metadata, and its two parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

from nwor_specpv.vllm.specpv.refresh import RefreshStep

from .prefix_planner import PrefixSchedule


@dataclass
class VerifyPart:
    """The requests at the front of the batch, which verify drafts."""

    num_rows: int
    max_rows: int  # of one request
    uniform: bool  # so many rows has every request, but for those that only fill the batch up
    block_table: torch.Tensor  # [B, pages]
    prefix_lens: torch.Tensor  # [B] int32
    query_start: torch.Tensor  # [B + 1] int32
    plan: torch.Tensor | None = None  # for our attention, where a layer of the group needs it
    prefix: PrefixSchedule | None = None  # for FlashAttention over the prefix, likewise
    refresh: RefreshStep | None = None
    tree_mask: torch.Tensor | None = None  # [num_rows, words] int64; None: drafts are chains


@dataclass
class NworFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata of the whole batch, and its two parts."""

    verify: VerifyPart | None = None
    rest: FlashAttentionMetadata | None = None  # of the requests behind, None: there are none
