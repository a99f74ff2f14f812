"""What the drafts of steps over long contexts are.

Where passes fail, the process with the worker knows: a scheduler in it chooses them no more. One in
another process goes on choosing by speed; its workers then make the drafts by guesses.
"""

from __future__ import annotations

from nwor_specpv.arms import Arm, ArmChoice, Choice, make_arms
from nwor_specpv.vllm.scheduling.decisions import Decisions

from .lengths import Lengths


class LongContextDecisions(Decisions):
    """Plain steps, guesses or partial passes. Thread-safety: none."""

    def __init__(self, lengths: Lengths, *, lookups: bool) -> None:
        """`lookups`: guesses come from lookups, so that any number of them costs the same."""
        super().__init__(ArmChoice(make_arms(lengths.limit, lengths.guesses, long_guesses=lookups)))
        self._lengths = lengths

    def choose(self, batch: int, context: float, longest: int, *, measurable: bool) -> Choice:
        """See the base class."""
        passes = longest > self._lengths.shortest
        return self.choice.choose(batch, context, passes=passes, measurable=measurable)

    def fixed_arm(self, longest: int) -> Arm | None:
        """See the base class."""
        return self._lengths.fixed_arm(longest) if self._lengths.fixed else None

    def fail_passes(self) -> None:
        """Passes have failed in the worker of this process."""
        if not self._lengths.given_up:
            self._lengths.give_up()
            self.choice.fail_passes()
