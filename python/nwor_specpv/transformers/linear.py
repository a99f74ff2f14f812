"""Replaces a model's linear layers while a Generator runs it: few rows use `linear_rows`."""

from __future__ import annotations

import torch
from torch import nn

from .replacements import Replacement, is_hooked

_linear_rows = torch.ops.nwor_specpv.linear_rows.default
# With more rows torch's product is faster; prompts always use it.
MAX_ROWS = 64


class RowLinear(nn.Module):
    """Replaces a linear layer and shares its parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def shares(self, linear: nn.Linear) -> bool:
        """Whether `linear` still has these parameters."""
        return self.weight is linear.weight and self.bias is linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() <= MAX_ROWS * self.in_features:
            return _linear_rows(rows, self.weight, self.bias)
        return nn.functional.linear(rows, self.weight, self.bias)


def row_linears(model: nn.Module) -> list[Replacement]:
    """Replacements for every plain linear layer on the CPU."""
    return [
        Replacement(parent, name, child, RowLinear(child))
        for parent in model.modules()
        for name, child in parent._modules.items()
        if is_plain(child) and child.weight.device.type == "cpu"
    ]


def unchanged_linears(found: list[Replacement]) -> list[Replacement]:
    """Leaves out layers that were hooked or changed since."""
    return [
        one
        for one in found
        if one.is_current and is_plain(one.original) and one.module.shares(one.original)
    ]


def is_plain(module: nn.Module) -> bool:
    """Whether it is a linear layer without additions."""
    if type(module) is not nn.Linear or is_hooked(module):
        return False
    return module.weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
