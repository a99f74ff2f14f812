"""Linear layers of what stands in for a model: few rows use `linear_rows`."""

from __future__ import annotations

import torch
from torch import nn

from .stand_in import is_hooked

_linear_rows = torch.ops.nwor_specpv.linear_rows.default
# With more rows torch's product is faster; prompts always use it.
MAX_ROWS = 64


class RowLinear(nn.Module):
    """Replaces a linear layer and shares its parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() <= MAX_ROWS * self.in_features:
            return _linear_rows(rows, self.weight, self.bias)
        return nn.functional.linear(rows, self.weight, self.bias)


def replace_linears(model: nn.Module) -> None:
    """Replaces every plain linear layer on the CPU."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if is_plain(child) and child.weight.device.type == "cpu":
                parent._modules[name] = RowLinear(child)


def is_plain(module: nn.Module) -> bool:
    """Whether it is a linear layer without additions."""
    if type(module) is not nn.Linear or is_hooked(module):
        return False
    return module.weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
