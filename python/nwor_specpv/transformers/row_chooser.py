"""Chooses the number of rows of a verification step from the times and tokens of steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

from nwor_specpv.drafters import TreeConfig
from nwor_specpv.running_mean import RunningMean

# Sizes that are measured and tried. The first is plain decoding.
SIZES = (1, 3, 5, 8, 12, 16, 24, 32)
_CHAIN_ROWS = 5  # up to here a tree is a chain, since breadth would cost depth
_CHAINS = tuple(size for size in SIZES if 1 < size <= _CHAIN_ROWS)
_KEEP = 0.9  # weight of the past in running averages
_SLACK = 1.02  # a step sets a new mark if it is at most this much slower than the best
_DRAFTING = 1.5  # the most that a step with drafting costs relative to its pass
_HOPE = 1.4  # the most that the next larger tree is expected to gain
_DOUBT = 0.7  # tokens added to a size that was seldom tried


def _mean() -> RunningMean:
    return RunningMean(most_past=_KEEP / (1 - _KEEP))


@dataclass
class _Arm:
    """What is known of one size."""

    gain: RunningMean = field(default_factory=_mean)  # tokens of a step
    seconds: float = 0.0  # of the quickest steps: a delayed step says nothing about its rows
    tries: int = 0

    @property
    def tokens(self) -> float:
        return self.gain.value

    def note(self, tokens: float, seconds: float) -> None:
        self.gain.add(tokens)
        self.seconds = min(seconds, _SLACK * self.seconds) if self.tries else seconds
        self.tries += 1


class RowChooser:
    """Tries sizes while decoding and keeps the one with the most tokens a second.

    It starts from measured costs: a size is never tried if its step costs more than its tokens can
    be worth.
    """

    def __init__(self, costs: dict[int, float]) -> None:
        self.costs = dict(costs)  # rows of a pass -> seconds
        self._arms: dict[Hashable, dict[int, _Arm]] = {}
        self._right: dict[Hashable, RunningMean] = {}  # share of chains' drafts that were right

    def shape(self, tree: TreeConfig, rows: int) -> TreeConfig:
        """`tree` with `rows` rows, and a depth and breadth that fit them."""
        depth = min(tree.depth, max(1, rows - 1))
        return replace(tree, rows=rows, depth=depth, top_k=1 if rows <= _CHAIN_ROWS else tree.top_k)

    def choose(self, tree: TreeConfig, situation: Hashable, batch: int) -> TreeConfig:
        """The next step's tree. Each `situation` (batch, views, context) is learnt separately."""
        arms = self._arms.setdefault(situation, {})
        tried: list[int] = []
        hopes: dict[int, float] = {}
        for size in self._worth_trying(tree, batch):  # each is tried before it is compared
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
        """Notes a step of at most `rows` rows: `tokens` per request on average, `runs`: of each."""
        arms = self._arms.setdefault(situation, {})
        arms.setdefault(rows, _Arm()).note(tokens, seconds)
        if runs and rows in _CHAINS:
            right = self._right.setdefault(situation, _mean())
            self._learn_from_chain(arms, right, rows, runs)

    @staticmethod
    def _learn_from_chain(
        arms: dict[int, _Arm], right: RunningMean, rows: int, runs: Sequence[int]
    ) -> None:
        """Chains begin alike, so the result of one predicts a shorter or longer one.

        A longer one would have continued only where all of this one was right, and then with the
        recent share of drafts that were `right`. So every size learns when a text becomes easier
        or harder.
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
        """Tokens a second, with a bonus for sizes that were seldom tried. One row gives one token.

        The bonus grows with time, so a few early misses do not rule out a size for good.
        """
        arm = arms[size]
        steps = sum(other.tries for other in arms.values())
        doubt = _DOUBT * math.sqrt(math.log(steps) / arm.tries) if size > 1 else 0.0
        return (arm.tokens + doubt) / self._seconds(arms, size, batch)

    def _seconds(self, arms: dict[int, _Arm], size: int, batch: int) -> float:
        """The measured time, or the estimate from costs when every try was delayed."""
        likely = _DRAFTING * arms[1].seconds * self.cost(size * batch) / self.cost(batch)
        return min(arms[size].seconds, likely)

    def _promise(self, arms: dict[int, _Arm], tried: int, larger: int, batch: int) -> float:
        """The most tokens a second that a larger tree is expected to give."""
        seconds = self._seconds(arms, tried, batch)
        seconds *= self.cost(larger * batch) / self.cost(tried * batch)
        return _HOPE * arms[tried].tokens / seconds

    def cost(self, rows: int) -> float:
        """Seconds of a pass over `rows` rows, interpolated from the measured sizes."""
        known = sorted(self.costs)
        for low, high in itertools.pairwise(known):
            if rows <= high:
                part = (rows - low) / (high - low)
                return self.costs[low] + part * (self.costs[high] - self.costs[low])
        return self.costs[known[-1]] * rows / known[-1]

    def _worth_trying(self, tree: TreeConfig, batch: int) -> list[int]:
        # No tree gives more than one token per row or per depth. The smallest is always tried: a
        # machine that was busy during the measurement must not end all drafting.
        one = self.cost(batch)
        return [
            size
            for size in SIZES
            if size <= SIZES[1] or self.cost(size * batch) / one < min(size, tree.depth + 1)
        ]
