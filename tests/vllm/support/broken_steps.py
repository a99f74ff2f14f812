"""Steps that are broken between staging and commit, so that the commit finds it and says so."""

from __future__ import annotations

from typing import Any

import torch

from nwor_specpv.vllm.hooks.recovery import recovery_of
from support.engines import own_engine
from support.prefix_cache_blocks import scheduler_of

OF_SLOTS = ("slot_range", "duplicate_slot")  # destinations that a commit is given
OF_LAYERS = ("slot_mismatch", "incomplete_staging")  # what a layer did; REQUIRES: no graphs
FAR_SLOT = 2**40


class BrokenSteps:
    """Breaks steps of an engine until it is told to stop. REQUIRES: the engine has run."""

    def __init__(self, engine: Any, fault: str, every: int = 6) -> None:
        self.num_broken = 0
        self._engine, self._fault, self._every = engine, fault, every
        self._num_seen = 0
        self._latest: Any = None  # the step that a layer has broken
        if fault in OF_SLOTS:
            self._commit = engine.steps._commit
            engine.steps._commit = self._commit_elsewhere
        else:
            self._write = engine.steps.write
            engine.steps.write = self._write_otherwise

    def stop(self) -> None:
        for name in ("_commit", "write"):
            vars(self._engine.steps).pop(name, None)

    def _is_next(self) -> bool:
        self._num_seen += 1
        broken = self._num_seen % self._every == 3
        self.num_broken += broken
        return broken

    # ---- destinations ----

    def _commit_elsewhere(self, step: Any, counts: torch.Tensor) -> list[Any]:
        accepted = [(b, i) for b, count in enumerate(counts.tolist()) for i in range(count)]
        if len(accepted) < 2 or not self._is_next():
            return self._commit(step, counts)
        slots = [self._spoil(step, group, accepted) for group in sorted(step.slots)]
        return [step.interceptor.commit(step.path, counts, slots, rows="request")]

    def _spoil(self, step: Any, group: int, accepted: list[tuple[int, int]]) -> torch.Tensor:
        """The slots of a group's rows, the last accepted one's broken."""
        starts = torch.tensor([0, *step.plan.query_lens[:-1]], device=step.path.device).cumsum(0)
        rows = step.path.clamp(min=0).long() + starts[:, None]
        slots = step.slots[group][rows.clamp(max=len(step.slots[group]) - 1)]
        slots[accepted[-1]] = FAR_SLOT if self._fault == "slot_range" else slots[accepted[0]]
        return slots

    # ---- layers ----

    def _write_otherwise(
        self, layer: str, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, **how: Any
    ) -> bool:
        """The last layer of a step with drafts names other slots, or stages nothing and is written
        by vLLM. Once drafts have ended there are none."""
        steps, engine = self._engine.steps, self._engine
        if not steps.stages or layer != engine.own_layers[-1] or not self._is_next():
            return self._write(layer, key, value, slots, **how)
        if self._fault == "incomplete_staging":
            return False
        return self._write(layer, key, value, slots.roll(1), **how)


def drafts_are_off(llm: Any) -> bool:
    """Whether the next step has no drafts."""
    return recovery_of(scheduler_of(llm)).drafts_are_off


def reset(llm: Any) -> None:
    """Drafts come back, whatever was found before."""
    own_engine().faults._until = recovery_of(scheduler_of(llm))._until = 0.0
    assert not drafts_are_off(llm)


def failures(before: dict[str, Any], now: dict[str, Any]) -> dict[str, int]:
    """Failed commits since a snapshot, by reason."""
    name = "nwor_commit_failures_total"
    grown = {reason: n - before[name].get(reason, 0) for reason, n in now[name].items()}
    return {reason: n for reason, n in grown.items() if n}
