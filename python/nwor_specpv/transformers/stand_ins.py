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
