"""A drafting head on CUDA in mode `refresh`: of a long request it sees the latest tokens only.

It would read its whole cache for every draft otherwise, which is most of what is left to save once
the target attends to views. What the head sees changes what is drafted, and how much is accepted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

from nwor_specpv.vllm.engine import engine_of


class HeadFlashImpl(FlashAttentionImpl):
    """vLLM's own, over as many tokens as a view holds: shorter requests see all of theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refresh = engine_of(get_current_vllm_config()).refresh
        whole = refresh is None or self.sliding_window != (-1, -1)
        self.latest = None if whole else (refresh.view_tokens - 1, 0)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        given = layer, query, key, value, kv_cache, self._shortened(attn_metadata), output
        return super().forward(*given, output_scale, output_block_scale)

    def _shortened(self, metadata: FlashAttentionMetadata | None) -> FlashAttentionMetadata | None:
        """The metadata may be the target's as well. If it has a schedule, that is either one of
        the head's own (`head_window`) or one of whole contexts (prompts), and is kept."""
        if metadata is None or self.latest is None or metadata.scheduler_metadata is not None:
            return metadata
        shortened = copy.copy(metadata)
        shortened.sliding_window = self.latest
        return shortened


def head_window(vllm_config: Any, layer_names: Sequence[str]) -> tuple[int, int] | None:
    """The window of a cache group that has such layers alone; None: it has others, or no window."""
    layers = vllm_config.compilation_config.static_forward_context
    windows = {getattr(layers[name].impl, "latest", None) for name in layer_names}
    return windows.pop() if len(windows) == 1 else None
