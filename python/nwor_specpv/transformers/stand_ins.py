"""Modules of ours in place of a model's own while a Generator runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class StandIn:
    parent: nn.Module
    name: str
    theirs: nn.Module
    ours: nn.Module

    @property
    def is_there(self) -> bool:
        """Whether the model still has the module that ours stands in for."""
        return self.parent._modules[self.name] is self.theirs


@contextmanager
def in_place(stand_ins: Iterable[StandIn]) -> Iterator[None]:
    """They are in place inside; outside everything is as it was. May be nested."""
    stand_ins = list(stand_ins)
    before = [one.parent._modules[one.name] for one in stand_ins]
    for one in stand_ins:
        one.parent._modules[one.name] = one.ours
    try:
        yield
    finally:
        for one, module in zip(stand_ins, before, strict=True):
            one.parent._modules[one.name] = module


def is_hooked(module: nn.Module) -> bool:
    """Hooks, or another `forward` of its own, as libraries put it there."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in vars(module)
