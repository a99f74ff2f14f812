"""Engines' cache tensors as the [P, S, H, D] views that every call here takes.

A view copies nothing. vLLM has used three shapes within one year; all of them, and a head-major
pair, come down to strides.
"""

from __future__ import annotations

import torch

from .errors import NworError

LAYOUTS = {
    "kv_first": "(2, P, S, H, D): vLLM up to 0.22",
    "kv_second": "(P, 2, S, H, D): vLLM 0.23 to 0.25",
    "packed": "(P, H, S, 2D), K and V side by side in the last dimension: vLLM 0.26",
    "head_major": "(2, P, H, S, D)",
}


def cache_views(kv_cache: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The key and value views of one engine tensor; `layout` is a name of LAYOUTS."""
    if layout not in LAYOUTS:
        names = ", ".join(LAYOUTS)
        raise NworError(f"layout: got {layout!r}, expected one of {names}")
    rank = 4 if layout == "packed" else 5
    if kv_cache.dim() != rank:
        raise NworError(
            f"kv_cache: got {kv_cache.dim()} dimensions {list(kv_cache.shape)}, "
            f"expected {rank} {LAYOUTS[layout]}"
        )
    if layout == "packed":
        if kv_cache.shape[-1] % 2:
            raise NworError(
                f"kv_cache: got a last dimension of {kv_cache.shape[-1]}, expected K and V of one "
                "size beside each other"
            )
        key, value = kv_cache.transpose(1, 2).chunk(2, dim=-1)
        return key, value
    pair = 1 if layout == "kv_second" else 0
    if kv_cache.shape[pair] != 2:
        raise NworError(
            f"kv_cache: got size {kv_cache.shape[pair]} in dimension {pair}, expected 2 (K, V)"
        )
    key, value = kv_cache.unbind(pair)
    if layout == "head_major":
        return key.transpose(1, 2), value.transpose(1, 2)
    return key, value
