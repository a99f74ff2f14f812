"""Whether lossless partial verification pays, from what steps cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .running_mean import RunningMean

_KEEP = 0.7  # weight of the past in running averages
_WATCHED = 6  # full steps before views are thought of
_PROMISE = 1.15  # gain that an estimate must show before views are tried
_WORTH = 1.05  # and that the trial's own figures must show before they are kept
_TRIAL_STEPS = 2  # partial steps of a trial: a wrong one costs little
_REST = 512  # tokens with full steps after views have not paid; doubles each time
_MOST_REST = 1 << 14
# Rows that attention takes along for the cost of one, where reading K/V is what it waits for.
_FREE_ROWS = 16


@dataclass
class CallSizes:
    """What a call's steps have in common."""

    batch: int
    view_tokens: int
    tail_rows: int  # slack of a tail and the largest tree


def _mean() -> RunningMean:
    return RunningMean(_KEEP)


class ViewPacer:
    """Starts with full steps; views are tried when they promise to pay and kept while they do.

    A tail costs each of its tokens a second row, and is lost from its first wrong token on. Where a
    row costs as much as on a CPU over a short context, no view makes up for that, which the curve
    of costs tells before anything is tried: `cost(rows)` are the seconds of a pass without context
    (None: unknown, so views are tried). `rows_cost`: attention costs by the row there.
    """

    def __init__(self, cost: Callable[[int], float] | None, *, rows_cost: bool) -> None:
        self._cost, self._rows_cost = cost, rows_cost
        self.viewing = False
        self.trials = 0
        self._trial = False
        self._tail = [0, 0.0, 0]  # tokens, seconds and partial steps since the last confirmation
        self._rest, self._rested = _REST, _REST
        self._begin_watching()

    def _begin_watching(self) -> None:
        self._full, self._drafting, self._partial = _mean(), _mean(), _mean()
        self._tokens, self._rows, self._fed = _mean(), _mean(), _mean()
        self._viewed = _mean()  # tokens a second of whole tails

    def begin(self) -> None:
        """A new call: no tail is waiting, and what its first steps cost is looked at afresh."""
        if self.viewing and self._trial:
            self.viewing = False
        self._trial, self._tail = False, [0, 0.0, 0]
        if not self.viewing:
            self._begin_watching()

    @property
    def hurry(self) -> bool:
        """The tail is to be confirmed now: a trial has seen enough."""
        return self._trial and self._tail[2] >= _TRIAL_STEPS

    def full_step(
        self,
        size: CallSizes,
        context: int,
        rows: float,
        tokens: float,
        seconds: float,
        drafting: float,
    ) -> bool:
        """A step without views that gave `tokens` to a request. True: now views."""
        self._full.add(seconds)
        self._drafting.add(drafting)
        self._tokens.add(tokens)
        self._rows.add(rows)
        self._rested += tokens
        if self._full.count < _WATCHED or self._rested < self._rest:
            return False
        if self._cost is not None and self.promise(size, context) < _PROMISE:
            self._rested = 0  # asked again later: contexts grow
            return False
        self._trial, self._tail = True, [0, 0.0, 0]
        self.trials += 1
        return True

    def promise(self, size: CallSizes, context: int) -> float:
        """Tokens a second with views that are never wrong, to those of full steps."""
        rows, batch = max(1.0, self._rows.value), size.batch
        alone = self._cost(round(rows * batch))
        attention = max(0.0, self._full.value - self._drafting.value - alone)
        partial = self._full.value - attention * max(0.0, 1 - size.view_tokens / context)
        tail = max(1.0, size.tail_rows - rows)
        more = (self._cost(round((rows + tail) * batch)) - alone) / tail
        more += attention / rows / (1 if self._rows_cost else _FREE_ROWS)
        return self._gain(partial, more, tail)

    def _gain(self, partial: float, more: float, tail: float) -> float:
        """Of tails of `tail` tokens, when a partial step and one row more in a full one cost so."""
        full, tokens = self._full.value, self._tokens.value
        seconds = tail / tokens * partial + full + tail * more
        return (tail + tokens) / seconds / (tokens / full)

    def partial_step(self, seconds: float) -> None:
        self._partial.add(seconds)
        self._tail[1] += seconds
        self._tail[2] += 1

    def confirmation(
        self, size: CallSizes, shown: float, lost: int, fed: float, seconds: float
    ) -> bool:
        """A full step over tails of `fed` tokens showed `shown`. True: now full steps again."""
        self._tail[0] += shown
        self._tail[1] += seconds
        self._viewed.add(self._tail[0] / max(self._tail[1], 1e-9))
        if fed:
            self._fed.add(max(0.0, seconds - self._full.value) / fed)
        self._tail = [0, 0.0, 0]
        pays = self._viewed.value * self._full.value > self._tokens.value
        if self._trial:
            self._trial = False
            tail = max(1.0, size.tail_rows - self._rows.value)
            pays = not lost and self._gain(self._partial.value, self._fed.value, tail) > _WORTH
            self._viewed = _mean()
        if pays:
            self._rest = _REST
            return False
        self._rest = min(_MOST_REST, 2 * self._rest)
        self._rested = 0
        self._begin_watching()
        return True

    def switch(self) -> None:
        self.viewing = not self.viewing
