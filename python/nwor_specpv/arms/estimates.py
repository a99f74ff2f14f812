"""What the arms of a step cost and yield: running means by batch size and context length. Pure.

An arm is a way to make a step: how many drafts it verifies and how many partial passes made them.
Batches of about the same size and context share a cell. A cell that has not seen an arm borrows
from its neighbours.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Arm(NamedTuple):
    """`drafts` are verified, `passes` partial passes made them; 0 passes: guesses alone."""

    drafts: int
    passes: int

    def __str__(self) -> str:
        if not self.drafts:
            return "plain"
        return f"{self.passes} passes" if self.passes else f"{self.drafts} guesses"


PLAIN = Arm(0, 0)
_PASSES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_FEW_PASSES = 2  # whose drafts seldom fill half the limit

ENOUGH = 3  # measured steps that make an estimate
_HALF_LIFE = 200  # steps
_MOST_STEPS, _LEAST_REQUESTS = 64, 256  # that an estimate weighs
_PAUSE = 50  # steps after which times are measured anew
_AFTER_PAUSE = 2  # steps that earlier tokens weigh then
_FEW = 5  # times up to which the median counts: one may mislead so few
# A step beyond these times the mean counts as so much: it may have waited for something else. With
# more steps the mean counts and not the median, since some arms have a dear step now and then.
_SLOWEST, _FASTEST = 1.5, 0.6
_SHIFTED = 4  # such steps in a row are a new level
# So are so many in a row that are all longer, or all shorter, than the mean by this share.
_SHIFTED_LITTLE, _LITTLE = 6, 0.15
_NOISE = 0.03  # least relative deviation of a step's time
_FAR = 2  # cells between which estimates are borrowed
_DISTANCE_ERROR = 0.04  # relative, for each cell between
_OLD = 250  # steps without an observation that double what an arm may yield


def draft_lengths(limit: int, guesses: int) -> list[int]:
    """Numbers of drafts that steps may verify; half the limit is enough for few passes."""
    return sorted({PLAIN.drafts, guesses, max(guesses, limit // 2), limit})


def make_arms(limit: int, guesses: int, *, long_guesses: bool = False) -> list[Arm]:
    """Plain first, then guesses alone, then numbers of passes in order.

    `long_guesses`: as many guesses as drafts cost nothing, so a step may have that many.
    """
    half = max(guesses, limit // 2)
    arms = [PLAIN, Arm(guesses, 0)]
    if long_guesses and limit > guesses:
        arms.append(Arm(limit, 0))
    most = max(1, limit - guesses)
    arms += [Arm(half if n <= _FEW_PASSES else limit, n) for n in _PASSES if n <= most]
    return arms


class Outlook(NamedTuple):
    """What a step of an arm is expected to take and to yield."""

    seconds: float
    tokens: float  # of each request
    error: float  # relative, of their ratio
    age: int = 0  # steps since the latest observation

    @property
    def rate(self) -> float:
        """Tokens of a request per second."""
        return self.tokens / self.seconds


class Estimate:
    """Running means of one arm in one cell. Thread-safety: none."""

    def __init__(self) -> None:
        self.count = 0  # measured steps since something has changed
        self.last = 0  # visit of the cell, of the latest observation
        self.seconds = self.tokens = 0.0
        self._seconds_spread = self._tokens_spread = 0.0  # variances
        self._steps = self._requests = 0.0  # weights
        self._timed = 0  # visit of the latest time
        self._first: list[float] = []  # times
        self._shifted = self._longer = self._shorter = 0  # steps in a row
        self._shared = 0.0  # the seconds that other arms have followed

    @property
    def rate(self) -> float:
        """Tokens of a request per second."""
        return self.tokens / self.seconds

    def add(
        self, visit: int, seconds: float | None, tokens: Sequence[int], *, rough: bool = False
    ) -> None:
        """Tokens that each request got; the time is None where it is not known. A rough time stands
        in until there is another."""
        if tokens:
            self._add_tokens(visit - self.last, tokens)
        if rough:
            self.seconds = self.seconds or seconds or 0.0
        elif seconds is not None:
            self._add_seconds(visit - self._timed, seconds)
            self._timed = visit
        self.last = visit

    def _add_seconds(self, gap: int, seconds: float) -> None:
        level = min(max(seconds, _FASTEST * self.seconds), _SLOWEST * self.seconds)
        self._shifted = self._shifted + 1 if level != seconds else 0
        self._longer = self._longer + 1 if seconds > (1 + _LITTLE) * self.seconds else 0
        self._shorter = self._shorter + 1 if seconds < (1 - _LITTLE) * self.seconds else 0
        little = max(self._longer, self._shorter)
        if gap > _PAUSE or self._shifted == _SHIFTED or little == _SHIFTED_LITTLE:
            self.doubt()
        self.count += 1
        if self.count <= _FEW:
            self._first.append(seconds)
            self.seconds, self._steps = median(self._first), self.count
            self._seconds_spread = sum((t - self.seconds) ** 2 for t in self._first) / self.count
            return
        past = min(_MOST_STEPS, self._steps * 0.5 ** (gap / _HALF_LIFE))
        self._steps = past + 1
        share, delta = 1 / self._steps, level - self.seconds
        self.seconds += share * delta
        self._seconds_spread = (1 - share) * (self._seconds_spread + share * delta**2)

    def _add_tokens(self, gap: int, tokens: Sequence[int]) -> None:
        number = len(tokens)
        mean = sum(tokens) / number
        inside = 0.0  # as in a plain step
        if mean != 1.0:
            inside = sum(map(operator.mul, tokens, tokens)) / number - mean**2
        # Small batches need more steps for as many requests.
        most = _AFTER_PAUSE if gap > _PAUSE else max(_MOST_STEPS, _LEAST_REQUESTS / number)
        past = min(most * number, self._requests * 0.5 ** (gap / _HALF_LIFE))
        self._requests = past + number
        share, delta = number / self._requests, mean - self.tokens
        self.tokens += share * delta
        spread = self._tokens_spread
        self._tokens_spread += share * (inside - spread) + share * (1 - share) * delta**2

    def drift(self, *, begins: bool) -> float:
        """How many times as long its steps take as when this was asked last; 1 where it `begins`
        to be asked."""
        if self.count < ENOUGH:
            return 1.0
        before = self.seconds if begins else self._shared or self.seconds
        self._shared = self.seconds
        return self.seconds / before

    def follow(self, drift: float) -> None:
        """Its steps take so many times as long as they did."""
        self.seconds *= drift
        self._seconds_spread *= drift**2
        self._first = [drift * seconds for seconds in self._first]

    def age(self) -> None:
        """What was observed is old from now on."""
        self.last -= _OLD

    def doubt(self) -> None:
        """Something has changed: it must be measured anew before it counts."""
        self.count = self._shifted = self._longer = self._shorter = 0
        self._first.clear()
        self._requests = min(self._requests, 1.0)

    def fade(self, left: float) -> None:
        """Of its drafts that were right, this share is expected to be right from now on."""
        self.tokens = 1.0 + left * (self.tokens - 1.0)

    def outlook(self, visit: int) -> Outlook | None:
        """None: nothing has been measured."""
        if self.seconds <= 0 or self.tokens <= 0:
            return None
        time_error = max(_NOISE, math.sqrt(self._seconds_spread) / self.seconds)
        token_error = math.sqrt(max(0.0, self._tokens_spread)) / self.tokens
        error = math.sqrt(time_error**2 / max(1, self._steps) + token_error**2 / self._requests)
        if self.count < ENOUGH:
            error = max(error, 1.0)
        age = visit - self.last
        return Outlook(self.seconds, self.tokens, error + age / _OLD, age)


class Cell:
    """Batches of about one size and context. Thread-safety: none."""

    def __init__(self, *, passes: bool = False) -> None:
        """`passes`: whether partial passes are possible."""
        self.passes = passes
        self.visits = 0
        self.arm = PLAIN  # the choice
        self.estimates: dict[Arm, Estimate] = {}
        self.borrowed: dict[Arm, Outlook] = {}
        self.alone = False  # borrows nothing
        self.bad_steps: list[tuple[float, Sequence[int]]] = []  # in a row
        self._leader: Arm | None = None  # whose times the others have followed last
        self.next_look = 0  # visit before which nothing is decided

    def outlook(self, arm: Arm) -> Outlook | None:
        """From its own observations if there are enough, else borrowed."""
        own = self.estimates.get(arm)
        found = own.outlook(self.visits) if own is not None else None
        if own is not None and own.count >= ENOUGH:
            return found
        return self.borrowed.get(arm, found)

    def drift(self) -> None:
        """Has other arms follow the chosen one: what changes its time, a busy host or a device that
        runs hot, changes theirs."""
        drift = self.estimates[self.arm].drift(begins=self.arm != self._leader)
        self._leader = self.arm
        if drift != 1.0:
            for arm, estimate in self.estimates.items():
                if arm != self.arm:
                    estimate.follow(drift)

    def measured(self, arm: Arm) -> bool:
        found = self.estimates.get(arm)
        return found is not None and found.count >= ENOUGH

    def level(self, arm: Arm) -> Estimate | Outlook | None:
        """As `outlook`, of what steps take and yield alone: errors take time to compute."""
        own = self.estimates.get(arm)
        if own is not None and own.count < ENOUGH:
            known = own.seconds > 0 and own.tokens > 0
            return self.borrowed.get(arm, own if known else None)
        return own or self.borrowed.get(arm)


CellKey = tuple[bool, int, int]


class Cells:
    """Cells by what a batch can do, its size and its mean context: half an octave each."""

    def __init__(self) -> None:
        self._cells: dict[CellKey, Cell] = {}

    def find(self, batch: int, context: float, *, passes: bool) -> Cell:
        """`passes`: whether partial passes are possible, which is another world."""
        key = (passes, round(2 * math.log2(max(1, batch))), round(2 * math.log2(max(64, context))))
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(passes=passes)
            near = self._nearest(key)
            if near is not None:
                cell.arm = near.arm
        return cell

    def borrow(self, cell: Cell, arms: Sequence[Arm]) -> None:
        """Fills in what the cell has not measured, from the nearest cells that have.

        Times are scaled by what plain steps take here and there.
        """
        key = next(key for key, known in self._cells.items() if known is cell)
        cell.borrowed.clear()
        for distance, near in self._by_distance(key):
            scale, plain = 1.0, near.estimates.get(PLAIN)
            if cell.measured(PLAIN):
                if plain is None or not near.measured(PLAIN):
                    continue
                scale = cell.estimates[PLAIN].seconds / plain.seconds
            for arm in arms:
                if arm in cell.borrowed or cell.measured(arm) or not near.measured(arm):
                    continue
                found = near.estimates[arm].outlook(near.visits)
                if found is not None:
                    # What was seen elsewhere grows old here, too.
                    error = found.error + _DISTANCE_ERROR * distance + cell.visits / _OLD
                    cell.borrowed[arm] = Outlook(
                        found.seconds * scale, found.tokens, error, found.age + cell.visits
                    )

    def _nearest(self, key: CellKey) -> Cell | None:
        return next((near for _, near in self._by_distance(key) if near.measured(PLAIN)), None)

    def _by_distance(self, key: CellKey) -> list[tuple[int, Cell]]:
        found = [
            (abs(other[1] - key[1]) + abs(other[2] - key[2]), cell)
            for other, cell in self._cells.items()
            if other != key and other[0] == key[0]
        ]
        return sorted((pair for pair in found if pair[0] <= _FAR), key=lambda pair: pair[0])
