"""Which vLLM this is, and whether what we lean on is still there.

vLLM promises no stability below its plugin interface, so every version was read before it was let
in, and every wrapped method is compared with the signature that was read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

# Read and run: see docs/vllm.md.
SUPPORTED = ("0.26.0",)

# How those versions lay out a cache: a name of nwor_specpv.LAYOUTS.
CACHE_LAYOUT = "packed"


def version_problem(version: str) -> str | None:
    """Why this vLLM is not let in, or None. Local parts such as +cpu do not matter."""
    if version.partition("+")[0] in SUPPORTED:
        return None
    return f"vLLM {version} is installed, expected {' or '.join(SUPPORTED)}"


def signature_problem(function: Callable[..., Any], expected: tuple[str, ...]) -> str | None:
    """Why `function` cannot be wrapped: its parameters are not the ones that were read."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        found = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        return f"{name} has no signature to look at: {error}"
    if found == expected:
        return None
    return f"{name} takes ({', '.join(found)}), expected ({', '.join(expected)})"
