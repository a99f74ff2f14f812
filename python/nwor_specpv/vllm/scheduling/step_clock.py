"""How long a step took, and which choice that was. Pure: times are given.

What is chosen when step t is scheduled makes the drafts at its end, which step t + 1 verifies. So
the time between the outputs of t and t + 1 belongs to the choice at t, and so do the tokens of
t + 1. On a GPU that is exact while the host is ahead. Where the host is late, or the device is the
CPU, that time has parts of the steps already scheduled behind: it counts only if they chose alike.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from nwor_specpv.arms import Choice

# Share of the time between two outputs in which the second step may not have been scheduled yet;
# beyond it the engine was idle.
_IDLE = 0.1


class _Step(NamedTuple):
    output: object
    choice: Choice
    measurable: bool
    at: float  # when it was scheduled


class StepClock:
    """Steps end in the order in which they were scheduled. Thread-safety: none."""

    def __init__(self) -> None:
        self._open: deque[_Step] = deque()
        self._ended: tuple[_Step, float] | None = None

    def scheduled(self, output: object, choice: Choice, now: float, *, measurable: bool) -> None:
        """`output` names the step; `measurable`: it has no rows of prompts."""
        self._open.append(_Step(output, choice, measurable, now))

    def pause(self) -> None:
        """A step has ended that was not scheduled here: the next one's time is not known."""
        self._ended = None

    def finished(self, output: object, now: float) -> tuple[Choice, float | None] | None:
        """The choice that the step's tokens came of, in the cell of this step; and its seconds.

        None: not known.
        """
        if all(step.output is not output for step in self._open):
            self._ended = None  # nothing was chosen for it: it has rows of prompts alone
            return None
        while self._open[0].output is not output:
            self._open.popleft()
        step = self._open.popleft()
        before, self._ended = self._ended, (step, now)
        if before is None or not before[0].measurable or not step.measurable:
            return None
        choice, began = before[0].choice, before[1]
        alike = all(
            other.measurable and other.choice.arm == choice.arm for other in (step, *self._open)
        )
        busy = step.at <= began + _IDLE * (now - began)
        return choice._replace(cell=step.choice.cell), now - began if alike and busy else None
