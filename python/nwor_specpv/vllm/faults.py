"""What an engine does after a fault: it computes its requests again and decodes without drafts.

A commit that failed leaves the cache without tokens that were emitted. The worker tells the
scheduler with the output of the step in which it learns that. This output and those of all steps
that were planned by then are dropped, all running requests are computed again by vLLM's own
preemption, and no drafts are scheduled for a while, or for good. The scheduler may be in another
process: `hooks.recovery` carries the notice there, and tells vLLM's scheduler.

vLLM reads the output of one rank, the first. A fault that another one has alone ends the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from nwor_specpv import _C
from nwor_specpv.errors import NworError, logger

# Without drafts for so long after a commit that failed.
PAUSE_SECONDS = 60.0
# Steps that vLLM may have under way; it has two.
MOST_IN_FLIGHT = 16
# These come from how layers run, so they would come again.
LASTING = frozenset({"slot_mismatch", "incomplete_staging", "contract_violation"})
# All ranks learn of it in the same step.
OF_ALL_RANKS = "rank_disagreement"


class Notice(NamedTuple):
    """What the scheduler has to know of a fault."""

    lost: bool  # K/V in the cache is wrong
    seconds: float  # without drafts


class Faults:
    """The faults of one worker. Thread-safety: none."""

    def __init__(
        self, *, recovers: bool, rank: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`recovers`: notices reach the scheduler. `rank`: of those whose outputs vLLM could read;
        it reads the first one's."""
        self._recovers = recovers
        self._rank = rank
        self._clock = clock
        self._notice: Notice | None = None  # for the output of this step
        self._until = 0.0  # no drafts are scheduled before
        self._paused: Any = None  # counted by `nwor_staging_off_engines`

    def lose(self, reason: str, problem: str) -> None:
        """A fault after which K/V in the cache is wrong. Raises NworError where the engine ends,
        and SystemExit where vLLM would not hear of an error."""
        if not self._recovers:
            raise NworError(
                f"nwor_specpv: {problem}; requests of this engine cannot be computed again, since "
                "its executor carries no word of it to the scheduler: restart the server and "
                "report this line"
            )
        if self._rank and reason != OF_ALL_RANKS:
            logger.critical(
                "nwor_specpv: %s; rank %d ends, since the other ranks do not know it: restart the "
                "server and report this line",
                problem,
                self._rank,
            )
            raise SystemExit(1)
        self._pause(reason, problem, "running requests are computed again, and ", lost=True)

    def stop(self, reason: str, problem: str) -> None:
        """A fault that left the cache right."""
        if self._recovers and not self._rank:
            self._pause(reason, problem, "", lost=False)

    def _pause(self, reason: str, problem: str, also: str, *, lost: bool) -> None:
        lasting = reason in LASTING
        span = "until the server is restarted" if lasting else f"for {PAUSE_SECONDS:.0f} s"
        if self._until != float("inf"):
            logger.error(
                "nwor_specpv: %s; %stokens are decoded without drafts %s; report this line",
                problem,
                also,
                span,
            )
        seconds = float("inf") if lasting else PAUSE_SECONDS
        before = self._notice or Notice(lost=False, seconds=0.0)
        self._notice = Notice(before.lost or lost, max(before.seconds, seconds))
        self._until = max(self._until, self._clock() + seconds)
        self._paused = self._paused or _C.StagingOff()

    def take(self) -> Notice | None:
        """What goes with the output of this step; None: nothing is new."""
        found, self._notice = self._notice, None
        if found is not None and found.lost:
            _C.count("nwor_recoveries_total", 1)
        return found

    def note_step(self, drafts: Sequence[int]) -> None:
        """A step begins. With drafts they are scheduled again; steps that were planned before the
        pause may have some, too."""
        if self._paused is not None and self._clock() >= self._until and any(drafts):
            self._paused = None
            logger.info("nwor_specpv: drafts are scheduled again")

    @property
    def drafts_are_off(self) -> bool:
        """Whether there is a pause that no step with drafts has ended."""
        return self._paused is not None


class Recovery:
    """What one scheduler was told of faults. Thread-safety: none."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0  # no drafts are scheduled before
        self._in_flight: list[Any] = []  # plans whose output was not processed, the newest last
        self._stale: list[Any] = []  # of these, the ones whose output is dropped

    @property
    def drafts_are_off(self) -> bool:
        """Whether the next step has no drafts."""
        return self._clock() < self._until

    def plan(self, scheduler_output: Any) -> None:
        """A step was planned; its output is yet to come."""
        self._in_flight = [*self._in_flight[1 - MOST_IN_FLIGHT :], scheduler_output]

    def process(self, scheduler_output: Any, notice: Notice | None) -> tuple[bool, bool]:
        """An output has come: whether all requests have to be computed again before it is
        processed, and whether it is dropped."""
        self._in_flight = [plan for plan in self._in_flight if plan is not scheduler_output]
        if notice is not None:
            self._until = max(self._until, self._clock() + notice.seconds)
        if any(plan is scheduler_output for plan in self._stale):  # what it lost is gone already
            self._stale = [plan for plan in self._stale if plan is not scheduler_output]
            return False, True
        if notice is None or not notice.lost:
            return False, False
        self._stale = self._in_flight
        return True, True
