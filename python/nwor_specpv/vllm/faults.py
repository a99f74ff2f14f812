"""What an engine does after a fault: it computes its requests again and decodes without drafts.

A commit that failed leaves the cache without tokens that were emitted. Every output that vLLM has
not processed by then is dropped, all running requests are computed again by vLLM's own preemption,
and no drafts are scheduled for a while, or for good. `hooks.recovery` tells vLLM's scheduler.

This works where the scheduler runs in the worker's process and no KV connector keeps copies of what
was lost. Elsewhere a fault ends the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from nwor_specpv import _C
from nwor_specpv.errors import NworError, logger

# Without drafts for so long after a commit that failed.
PAUSE_SECONDS = 60.0
# Steps that vLLM may have under way; it has two.
MOST_IN_FLIGHT = 16
# These come from how layers run, so they would come again.
LASTING = frozenset({"slot_mismatch", "incomplete_staging", "contract_violation"})


class Faults:
    """The faults of one engine. Thread-safety: none; worker and scheduler share a thread."""

    def __init__(self, *, recovers: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._recovers = recovers
        self._clock = clock
        self._lost = False  # requests have to be computed again
        self._until = 0.0  # no drafts are scheduled before
        self._paused: Any = None  # counted by `nwor_staging_off_engines`
        self._in_flight: list[Any] = []  # plans whose output was not processed, the newest last
        self._stale: list[Any] = []  # of these, the ones whose output is dropped

    # ---- the worker ----

    def lose(self, reason: str, problem: str) -> None:
        """A fault after which K/V in the cache is wrong. Raises NworError where the engine ends."""
        if not self._recovers:
            raise NworError(
                f"nwor_specpv: {problem}; requests of this engine cannot be computed again, since "
                "its scheduler is in another process, or a KV connector keeps copies: restart the "
                "server and report this line"
            )
        self._lost = True
        self._pause(reason, problem, "running requests are computed again, and ")

    def stop(self, reason: str, problem: str) -> None:
        """A fault that left the cache right."""
        if self._recovers:
            self._pause(reason, problem, "")

    def _pause(self, reason: str, problem: str, also: str) -> None:
        lasting = reason in LASTING
        span = "until the server is restarted" if lasting else f"for {PAUSE_SECONDS:.0f} s"
        if self._until != float("inf"):
            logger.error(
                "nwor_specpv: %s; %stokens are decoded without drafts %s; report this line",
                problem,
                also,
                span,
            )
        self._until = float("inf") if lasting else max(self._until, self._clock() + PAUSE_SECONDS)
        self._paused = self._paused or _C.StagingOff()

    # ---- the scheduler ----

    @property
    def drafts_are_off(self) -> bool:
        """Whether the next step has no drafts."""
        if self._paused is not None and self._clock() >= self._until:
            self._paused = None
            logger.info("nwor_specpv: drafts are scheduled again")
        return self._paused is not None

    def plan(self, scheduler_output: Any) -> None:
        """A step was planned; its output is yet to come."""
        self._in_flight = [*self._in_flight[1 - MOST_IN_FLIGHT :], scheduler_output]

    def process(self, scheduler_output: Any) -> tuple[bool, bool]:
        """An output has come: whether all requests have to be computed again before it is
        processed, and whether it is dropped."""
        self._in_flight = [plan for plan in self._in_flight if plan is not scheduler_output]
        if self._lost:
            self._lost = False
            self._stale = self._in_flight
            _C.count("nwor_recoveries_total", 1)
            return True, True
        stale = any(plan is scheduler_output for plan in self._stale)
        self._stale = [plan for plan in self._stale if plan is not scheduler_output]
        return False, stale
