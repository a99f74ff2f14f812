"""What the drafts of steps over long contexts are.

Where passes fail, the process with the worker knows: a scheduler in it chooses them no more. One in
another process goes on choosing by speed; its workers then make the drafts by guesses.
"""

from __future__ import annotations

from nwor_specpv.arms import Arm, ArmChoice, Choice, make_arms
from nwor_specpv.vllm.scheduling.decisions import Decisions

from .lengths import Lengths
from .scouts import Scouts


class LongContextDecisions(Decisions):
    """Plain steps, guesses or partial passes. Thread-safety: none."""

    rests = True

    def __init__(self, lengths: Lengths, *, matches: tuple[int, int] | None) -> None:
        """`matches`: guesses come from lookups with so many tokens in common, at least and at most,
        so that any number of them costs the same. None: from a head."""
        arms = make_arms(lengths.limit, lengths.guesses, long_guesses=matches is not None)
        super().__init__(ArmChoice(arms))
        self._lengths = lengths
        self.scouts: Scouts | None = None
        if matches is not None and not lengths.fixed:
            self.scouts = Scouts(lengths.limit, matches)
            self.choice.foresee = self.scouts.tokens

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
