"""Replaces modules of a model while a Generator runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Replacement:
    """`module` takes the place of `original`, the child `name` of `parent`."""

    parent: nn.Module
    name: str
    original: nn.Module
    module: nn.Module

    @property
    def is_current(self) -> bool:
        """Whether the model still has the original."""
        return self.parent._modules[self.name] is self.original


@contextmanager
def replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Inside, the replacements are in place; afterwards the model is as before. May be nested."""
    replacements = list(replacements)
    before = [one.parent._modules[one.name] for one in replacements]
    for one in replacements:
        one.parent._modules[one.name] = one.module
    try:
        yield
    finally:
        for one, module in zip(replacements, before, strict=True):
            one.parent._modules[one.name] = module


def is_hooked(module: nn.Module) -> bool:
    """Whether a library has added hooks to the module, or a `forward` of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or "forward" in vars(module)
