"""Functions and classes of vLLM that the plugin relies on, and whether they are as they were read.

vLLM promises no stability below its plugin interface, so each is compared with what was read before
it is touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VllmFunction:
    """A function of vLLM, or a method, and the names of its parameters."""

    module: str
    path: str  # in the module: `function` or `Class.method`
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


@dataclass(frozen=True)
class VllmFields:
    """A dataclass of vLLM and the names of its fields."""

    module: str
    path: str
    fields: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


@dataclass(frozen=True)
class VllmNames:
    """A function or class of vLLM and names that it has, among others: parameters of the function,
    fields of the class, or attributes that its methods set."""

    module: str
    path: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"


def signature_problem(function: Callable[..., Any], expected: tuple[str, ...]) -> str | None:
    """Why `function` cannot be used: its parameters are not the expected ones. None: they are."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        found = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        return f"vLLM's {name} has no signature that could be checked ({error})"
    if found == expected:
        return None
    return f"vLLM's {name} takes ({', '.join(found)}), expected ({', '.join(expected)})"
