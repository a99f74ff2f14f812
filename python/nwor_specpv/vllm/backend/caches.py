"""K/V caches of vLLM's layers: their K and V, and rows written to them at once."""

from __future__ import annotations

from typing import Any

import torch

from nwor_specpv import cache_views, write_rows
from nwor_specpv.vllm import versions


def key_value_of(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [P, S, Hkv, D] of a cache as vLLM lays it out."""
    return cache_views(cache, versions.adapter.cache_layout)


def views_of(
    layer: Any,
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]:
    """K and V of a layer's cache; of a quantised one also the scales of both."""
    cache = layer.kv_cache
    if cache.dtype != torch.uint8:
        return key_value_of(cache), ()
    codes = key_value_of(cache.view(torch.float8_e4m3fn))
    return codes, (layer._k_scale, layer._v_scale)


def scaled_caches(
    layer: Any, cache: torch.Tensor
) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]:
    """K and V of a layer's cache, and the scales that attention needs beside quantised ones."""
    if cache.dtype != torch.uint8:
        return key_value_of(cache), {}
    codes = key_value_of(cache.view(torch.float8_e4m3fn))
    return codes, {"k_scale": layer._k_scale, "v_scale": layer._v_scale}


def plain_query(layer: Any, query: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Queries [T, H, D] of a layer as numbers: vLLM quantises them beside a quantised cache."""
    if query.dtype == dtype:
        return query
    scale = layer._q_scale
    if scale.numel() > 1:  # one of each KV head
        scale = scale.repeat_interleave(query.shape[1] // scale.numel())[:, None]
    return query.to(dtype).mul_(scale)


def write_direct(
    caches: tuple[torch.Tensor, torch.Tensor],
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    *scales: torch.Tensor,
) -> None:
    """Writes rows to their slots as an engine without staging would."""
    write_rows(key, value, *caches, slots, *scales)
