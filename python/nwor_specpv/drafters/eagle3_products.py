"""The products of an EAGLE3 head: few rows on a CPU have one of their own."""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import linear

# With more rows than this, torch's product is faster than the one for few rows.
FEW_ROWS = 64


def multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiplies in the type of the weights; takes and returns float32."""
    if rows.is_cpu and rows.numel() <= FEW_ROWS * rows.shape[-1]:
        return torch.ops.nwor_specpv.linear_rows.default(rows, weight)
    if rows.is_cpu and weight.dtype == torch.bfloat16 and not _multiplies_bfloat16():
        return linear(rows, weight.float())
    return linear(rows.to(weight.dtype), weight).float()


@cache
def _multiplies_bfloat16() -> bool:
    """Whether this CPU has a fast bfloat16 product; without one torch warns and is slow."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
