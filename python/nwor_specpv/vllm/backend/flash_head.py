"""A drafting head on CUDA: in mode `refresh` with a window, and over the rows of a tree.

In mode `refresh` it sees the latest tokens of a long request only. It would read its whole cache
for every draft otherwise, which is most of what is left to save once the target attends to views.
What the head sees changes what is drafted, and how much is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

from nwor_specpv.vllm import versions
from nwor_specpv.vllm.engine import engine_of
from nwor_specpv.vllm.tree.level import TreeLevel

_WHOLE = (-1, -1)  # no window
_WINDOW = "nwor_specpv_window"


class HeadFlashImpl(FlashAttentionImpl):
    """vLLM's own, over as many tokens as a view holds: shorter requests see all of theirs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refresh = engine_of(get_current_vllm_config()).refresh
        whole = refresh is None or self.sliding_window != _WHOLE
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
        seen = attn_metadata
        if seen is not None and self.latest is not None:
            seen = versions.adapter.windowed(self, seen, self.window_of(seen))
        given = layer, query, key, value, kv_cache, seen, output
        return super().forward(*given, output_scale, output_block_scale)

    def window_of(self, metadata: FlashAttentionMetadata) -> tuple[int, int]:
        """The metadata may be the target's as well. If it has a schedule, that is either one of
        the head's own (`of_window`) or one of whole contexts (prompts), and it stands."""
        if metadata.scheduler_metadata is None:
            return self.latest
        return getattr(metadata, _WINDOW, _WHOLE)


class TreeHeadFlashImpl(FlashAttentionImpl):
    """vLLM's own, and our attention for rows of a tree, which are never written."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | TreeLevel | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(attn_metadata, TreeLevel):
            return attn_metadata.attend(self, layer, query, key, value, kv_cache, output)
        given = layer, query, key, value, kv_cache, attn_metadata, output
        return super().forward(*given, output_scale, output_block_scale)


def of_window(metadata: FlashAttentionMetadata, window: tuple[int, int]) -> FlashAttentionMetadata:
    """Notes the window that the schedule in the metadata is of."""
    setattr(metadata, _WINDOW, window)
    return metadata


def head_window(vllm_config: Any, layer_names: Sequence[str]) -> tuple[int, int] | None:
    """The window of a cache group that has such layers alone; None: it has others, or no window."""
    layers = vllm_config.compilation_config.static_forward_context
    windows = {getattr(layers[name].impl, "latest", None) for name in layer_names}
    return windows.pop() if len(windows) == 1 else None
