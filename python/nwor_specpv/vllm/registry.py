"""The engines of this process, by the vLLM configuration that each was built for.

Hooks, layers and schedulers look their engine up here, so that none of them imports it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch


class RegisteredEngine(Protocol):
    """What others use of `engine.Engine`."""

    layers: Mapping[str, Any]
    settings: Any
    off: str | None  # why nothing is staged; None: drafts are staged
    lossless: bool  # drafts come from views
    refresh: Any  # None: not in mode `refresh`
    lengths: Any  # None: not in mode `lossless` on runner V2
    trees: Any  # None: drafts are chains
    draft_lengths: tuple[int, ...]  # that our scheduler may choose; empty: it does not choose
    names: Sequence[str]  # of a step's requests, in their order (runner V2)
    scheduled_drafts: Sequence[int] | None  # of each, where vLLM says so
    num_drafts: int  # that the scheduler wants for the next step (runner V2); 0: a plain one
    num_passes: int  # that make them; 0: guesses alone
    plain_step: bool  # has no drafts and makes none (runner V2)
    prefix_hits: bool  # a request may read what another one of the step computes
    sizes_caches: bool  # vLLM looks how large caches may be, with graphs that it takes away again
    faults: Any  # of this worker

    def attach(self, runner: Any) -> None:
        """Says which model runner drives the engine."""

    def finish(self, accepted: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Ends the step: `accepted` gives the counts [B] for the numbers of drafts [B]."""


# Engines that may still run, the newest last. Layers keep theirs alive; the newest is kept here,
# too, for those who ask for it between steps.
_engines: list[weakref.ref[Any]] = []
_newest: RegisteredEngine | None = None


def add_engine(engine: RegisteredEngine) -> None:
    """Registers an engine, which is the newest from now on."""
    global _newest
    _newest = engine
    _engines[:] = [known for known in _engines if known() is not None]
    _engines.append(weakref.ref(engine))


def find_engine(vllm_config: Any) -> RegisteredEngine | None:
    """The engine of this configuration, if there is one yet."""
    context = vllm_config.compilation_config.static_forward_context
    if _newest is not None and _newest.layers is context:  # as nearly always
        return _newest
    known = (engine() for engine in reversed(_engines))
    return next((e for e in known if e is not None and e.layers is context), None)


def current_engine() -> RegisteredEngine | None:
    """The newest engine of this process."""
    return _newest
