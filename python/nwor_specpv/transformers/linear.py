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
            if type(child) is nn.Linear and _supported(child):
                found.append((parent, name, child, RowLinear(child)))
    return found


def _supported(linear: nn.Linear) -> bool:
    weight = linear.weight
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    hooked = linear._forward_hooks or linear._forward_pre_hooks
    return weight.device.type == "cpu" and weight.dtype in dtypes and not hooked


@contextmanager
def row_linear(found: list[tuple[nn.Module, str, nn.Module, RowLinear]]) -> Iterator[None]:
    """Our layers are in place inside; outside the model is as it was."""
    for parent, name, _, ours in found:
        parent._modules[name] = ours
    try:
        yield
    finally:
        for parent, name, theirs, _ in found:
            parent._modules[name] = theirs
