"""How many rows a verification step should have, from what steps cost and what they bring."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from nwor_specpv.drafters import TreeConfig

from .running_mean import RunningMean

# Sizes that are measured and tried. The first is plain decoding.
SIZES = (1, 3, 5, 8, 12, 16, 24, 32)
_CHAIN_ROWS = 5  # up to here a tree is a chain: breadth at small sizes costs depth
_CHAINS = tuple(size for size in SIZES if 1 < size <= _CHAIN_ROWS)
_KEEP = 0.9  # weight of the past in running averages
_SLACK = 1.02  # by how much a step may be slower than the quickest before it and set a new mark
_DRAFTING = 1.5  # most that a step with its drafting costs beside the pass alone
_HOPE = 1.4  # most that the next larger tree may bring
_DOUBT = 0.7  # tokens by which a size may be better than it seemed; grows while it is not tried


def _mean() -> RunningMean:
    return RunningMean(_KEEP)


@dataclass
class _Arm:
    gain: RunningMean = field(default_factory=_mean)  # tokens of a step
    seconds: float = 0.0  # of the quickest steps: one that was held up says nothing about its rows
    tries: int = 0

    @property
    def tokens(self) -> float:
        return self.gain.value

    def note(self, tokens: float, seconds: float) -> None:
        self.gain.add(tokens)
        self.seconds = min(seconds, _SLACK * self.seconds) if self.tries else seconds
        self.tries += 1


class RowChooser:
    """Tries sizes while decoding and stays with the one that gives the most tokens a second.

    Starts from the measured cost of a step alone: a size whose step costs more than its tokens can
    be worth is never tried.
    """

    def __init__(self, costs: dict[int, float]) -> None:
        self.costs = dict(costs)  # rows of a pass -> seconds: the curve
        self._arms: dict[Hashable, dict[int, _Arm]] = {}
        self._right: dict[Hashable, RunningMean] = {}  # share of chains' drafts that were right

    def shape(self, tree: TreeConfig, rows: int) -> TreeConfig:
        """`tree` with a number of rows, and what depth and breadth make of them."""
        depth = min(tree.depth, max(1, rows - 1))
        return replace(tree, rows=rows, depth=depth, top_k=1 if rows <= _CHAIN_ROWS else tree.top_k)

    def choose(self, tree: TreeConfig, situation: Hashable, batch: int) -> TreeConfig:
        """The next step's tree. Each `situation` (batch, views, context) learns alone."""
        arms = self._arms.setdefault(situation, {})
        tried: list[int] = []
        hopes: dict[int, float] = {}
        for size in self._worth_trying(tree, batch):  # each is tried before it is judged
            if arms.setdefault(size, _Arm()).tries < 2:
                known = [arms[one].tokens / self._seconds(arms, one, batch) for one in tried]
                smallest = size <= SIZES[1]
                if smallest or self._promise(arms, tried[-1], size, batch) > max(known):
                    return self.shape(tree, size)
                break
            tried.append(size)
            hopes[size] = self._hope(arms, size, batch)
        return self.shape(tree, max(hopes, key=hopes.get))

    def note(
        self,
        rows: int,
        situation: Hashable,
        tokens: float,
        seconds: float,
        runs: Sequence[int] = (),
    ) -> None:
        """A step for which `rows` were allowed gave `tokens` per request; `runs`: to each."""
        arms = self._arms.setdefault(situation, {})
        arms.setdefault(rows, _Arm()).note(tokens, seconds)
        if runs and rows in _CHAINS:
            right = self._right.setdefault(situation, _mean())
            self._learn_from_chain(arms, right, rows, runs)

    @staticmethod
    def _learn_from_chain(
        arms: dict[int, _Arm], right: RunningMean, rows: int, runs: Sequence[int]
    ) -> None:
        """Chains begin alike: what one gave says what a shorter or longer one would have.

        A longer one would have gone on only where all of this one was right, and then with the
        share of drafts that are `right` of late. So a text that becomes easier or harder is
        noticed at every size, whichever is used.
        """
        for run in runs:
            for draft in range(1, min(run + 1, rows)):
                right.add(1.0 if draft < run else 0.0)
        for other in (size for size in _CHAINS if size != rows):
            if other not in arms:
                continue
            more = sum(right.value**drafts for drafts in range(1, other - rows + 1))
            told = [min(run, other) + (more if run == rows else 0.0) for run in runs]
            arms[other].gain.add(sum(told) / len(told))

    def _hope(self, arms: dict[int, _Arm], size: int, batch: int) -> float:
        """Tokens a second, the more generous the less is known. One row gives one token.

        What was judged long ago is doubted again: a few early misses end no drafter for good.
        """
        arm = arms[size]
        steps = sum(other.tries for other in arms.values())
        doubt = _DOUBT * math.sqrt(math.log(steps) / arm.tries) if size > 1 else 0.0
        return (arm.tokens + doubt) / self._seconds(arms, size, batch)

    def _seconds(self, arms: dict[int, _Arm], size: int, batch: int) -> float:
        """As measured, or what the curve says when every try of this size was held up."""
        likely = _DRAFTING * arms[1].seconds * self.cost(size * batch) / self.cost(batch)
        return min(arms[size].seconds, likely)

    def _promise(self, arms: dict[int, _Arm], tried: int, larger: int, batch: int) -> float:
        """Tokens a second that a larger tree can hope for."""
        seconds = self._seconds(arms, tried, batch)
        seconds *= self.cost(larger * batch) / self.cost(tried * batch)
        return _HOPE * arms[tried].tokens / seconds

    def cost(self, rows: int) -> float:
        """Seconds of a pass over `rows` rows, between and beyond the measured sizes by lines."""
        known = sorted(self.costs)
        for low, high in itertools.pairwise(known):
            if rows <= high:
                part = (rows - low) / (high - low)
                return self.costs[low] + part * (self.costs[high] - self.costs[low])
        return self.costs[known[-1]] * rows / known[-1]

    def _worth_trying(self, tree: TreeConfig, batch: int) -> list[int]:
        # No tree brings more than one token per row or per depth. The smallest is tried whatever
        # the curve says: a machine that was busy while it was measured must not end all drafting.
        one = self.cost(batch)
        return [
            size
            for size in SIZES
            if size <= SIZES[1] or self.cost(size * batch) / one < min(size, tree.depth + 1)
        ]
