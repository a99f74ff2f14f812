"""A model's linear layers while a Generator runs it: few rows go through `linear_rows`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

_linear_rows = torch.ops.nwor_specpv.linear_rows.default
# Beyond this torch's own product is faster; prefill is always torch's.
MAX_ROWS = 64


class RowLinear(nn.Module):
    """Stands in for a linear layer and shares its parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() <= MAX_ROWS * self.in_features:
            return _linear_rows(rows, self.weight, self.bias)
        return nn.functional.linear(rows, self.weight, self.bias)


def replacements(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module, RowLinear]]:
    """(parent, name, its linear layer, ours) of every plain linear layer on the CPU."""
    found = []
    for parent in model.modules():
        for name, child in parent._modules.items():
            if is_plain(child):
                found.append((parent, name, child, RowLinear(child)))
    return found


def is_plain(module: nn.Module) -> bool:
    """A linear layer on the CPU and nothing more."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    return module.weight.device.type == "cpu" and module.weight.dtype in dtypes


@contextmanager
def in_place(found: list[tuple[nn.Module, str, nn.Module, nn.Module]]) -> Iterator[None]:
    """Our modules are in place inside; outside everything is as it was. May be nested."""
    before = [(parent, name, parent._modules[name]) for parent, name, _, _ in found]
    for parent, name, _, ours in found:
        parent._modules[name] = ours
    try:
        yield
    finally:
        for parent, name, module in before:
            parent._modules[name] = module
