"""Which vLLM this is. `adapter` is the module that says what is particular to it.

Every version was read and run before it was let in.
"""

from __future__ import annotations

from . import v0_26
from .functions import VllmFunction, signature_problem

__all__ = ["VllmFunction", "adapter", "choose", "signature_problem", "supported"]

_ADAPTERS = (v0_26,)

adapter = _ADAPTERS[-1]


def supported() -> str:
    """The versions that are let in, for messages."""
    return " or ".join(version for known in _ADAPTERS for version in known.SUPPORTED)


def choose(version: str) -> str | None:
    """Chooses the adapter of this version of vLLM; the problem, if there is none for it.

    Local parts such as +cpu do not matter.
    """
    global adapter
    for known in _ADAPTERS:
        if version.partition("+")[0] in known.SUPPORTED:
            adapter = known
            return None
    return f"vLLM {version} is not supported; install vLLM {supported()}"
