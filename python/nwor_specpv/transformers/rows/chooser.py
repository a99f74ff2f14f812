"""Chooses the number of rows of a verification step from the times and tokens of steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from nwor_specpv.arms import PLAIN, Arm, ArmChoice, Choice, Pace
from nwor_specpv.drafters import TreeConfig

# Sizes that are measured and tried. The first is plain decoding.
SIZES = (1, 3, 5, 8, 12, 16, 24, 32)
_ARMS = [Arm(size - 1, 0) for size in SIZES]
_CHAIN_ROWS = 5  # up to here a tree is a chain, since breadth would cost depth
_DRAFTING = 0.2  # of a plain step, until it is measured
# A call is short, and a step's time is known at its end. What the first trials may lose must be
# small beside a call of a few dozen steps.
_PACE = Pace(
    probe_steps=3,
    probe_requests=3,
    settle_steps=0,
    look_interval=2,
    slow_first=False,
    first_credit=0.5,
    most_debt=0.0,
    free=0.25,
)


class RowChooser:
    """Tries sizes while decoding and keeps the one with the most tokens a second.

    Plain decoding is one of them (see `nwor_specpv.arms`): what trials lose is paid from an account
    of the time served. A size is never tried if its step, by the measured costs, takes longer than
    its tokens can be worth.
    """

    def __init__(self, costs: dict[int, float]) -> None:
        self.costs = dict(costs)  # rows of a pass -> seconds
        self._batch = 1
        self._choice = ArmChoice(_ARMS, _PACE, self._price)

    def shape(self, tree: TreeConfig, rows: int) -> TreeConfig:
        """`tree` with `rows` rows, and a depth and breadth that fit them."""
        depth = min(tree.depth, max(1, rows - 1))
        return replace(tree, rows=rows, depth=depth, top_k=1 if rows <= _CHAIN_ROWS else tree.top_k)

    def choose(
        self, tree: TreeConfig, batch: int, context: float, *, viewing: bool = False
    ) -> tuple[TreeConfig, Choice]:
        """The next step's tree, and the choice to give back with what came of it.

        `context`: tokens of a request, on average. `viewing`: steps see a part of it.
        """
        self._batch = batch
        arms = self._worth_trying(tree, batch)
        chosen = self._choice.choose(batch, context, passes=viewing, only=arms)
        return self.shape(tree, chosen.arm.drafts + 1), chosen

    def note(self, choice: Choice, seconds: float, tokens: Sequence[int]) -> None:
        """A step took so long and gave each request so many tokens.

        So many rows never take longer than as many steps of one row: what a probe takes beyond is
        the machine's, and one such step must not condemn a size.
        """
        plain = choice.cell.outlook(PLAIN)
        if choice.probe and plain is not None:
            seconds = min(seconds, (choice.arm.drafts + 1) * plain.seconds)
        self._choice.observe(choice, seconds, tokens)

    def cost(self, rows: int) -> float:
        """Seconds of a pass over `rows` rows, interpolated from the measured sizes."""
        known = sorted(self.costs)
        for low, high in itertools.pairwise(known):
            if rows <= high:
                part = (rows - low) / (high - low)
                return self.costs[low] + part * (self.costs[high] - self.costs[low])
        return self.costs[known[-1]] * rows / known[-1]

    def _price(self, arm: Arm, fewer: Arm) -> float:
        rows = [one.drafts + 1 for one in (arm, fewer)]
        costs = [self.cost(one * self._batch) for one in rows]
        drafting = _DRAFTING if fewer == PLAIN else 0.0
        return min(costs[0] / costs[1], rows[0] / rows[1]) + drafting

    def _worth_trying(self, tree: TreeConfig, batch: int) -> list[Arm]:
        # No tree gives more than one token per row or per depth. The smallest is always tried: a
        # machine that was busy during the measurement must not end all drafting.
        one = self.cost(batch)
        return [
            arm
            for arm in _ARMS
            if arm in (PLAIN, _ARMS[1])
            or self.cost((arm.drafts + 1) * batch) / one < min(arm.drafts + 1, tree.depth + 1)
        ]
