"""How many rows the draft trees of a step have, by what steps took: none, or one of `ARM_ROWS`."""

from __future__ import annotations

from nwor_specpv.arms import PLAIN, Arm, ArmChoice, Choice
from nwor_specpv.vllm.scheduling.decisions import Decisions

from .shape import ARM_ROWS, arms_of_batch

# What a further row of a step is taken to add to a plain one, before larger trees were measured.
_PER_ROW = 0.004


class TreeDecisions(Decisions):
    """Plain steps or trees. Thread-safety: none."""

    def __init__(self, room: int) -> None:
        """`room`: rows that a step may have."""
        arms = [PLAIN, *(Arm(rows - 1, 0) for rows in ARM_ROWS)]
        super().__init__(ArmChoice(arms, price=self._price))
        self._room, self._batch = room, 1

    def choose(self, batch: int, context: float, longest: int, *, measurable: bool) -> Choice:
        """See the base class."""
        self._batch = batch
        possible = [Arm(rows - 1, 0) for rows in arms_of_batch(batch, self._room)]
        return self.choice.choose(
            batch, context, passes=False, measurable=measurable, only=[PLAIN, *possible]
        )

    def name(self, arm: Arm) -> str:
        """For the log."""
        return f"trees of {1 + arm.drafts} rows" if arm.drafts else str(arm)

    def _price(self, arm: Arm, fewer: Arm) -> float:
        times = [1 + _PER_ROW * self._batch * one.drafts for one in (arm, fewer)]
        return times[0] / times[1]
