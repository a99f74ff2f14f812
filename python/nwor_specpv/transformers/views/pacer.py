"""Decides when lossless partial verification pays, from the times of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nwor_specpv.running_mean import RunningMean

_KEEP = 0.7  # weight of the past in running averages
_WATCHED = 6  # full steps before views are considered
_PROMISE = 1.15  # estimated gain from which views are tried
_WORTH = 1.05  # measured gain from which views are kept
_TRIAL_STEPS = 2  # partial steps of a trial
_REST = 512  # tokens with full steps after a failed trial; doubles each time
_MOST_REST = 1 << 14
_SHARE = 0.015  # of the time of full steps that trials may lose; trials of rows lose theirs, too
_TRIAL_LOSS = 1.5  # full steps' worth that a trial loses at most
# Rows that cost attention as much as one row where it waits for K/V.
_FREE_ROWS = 16


@dataclass
class CallSizes:
    """Sizes of a call's steps."""

    batch: int
    view_tokens: int
    tail_rows: int  # slack of a tail and the largest tree


def _mean() -> RunningMean:
    return RunningMean(most_past=_KEEP / (1 - _KEEP))


class ViewPacer:
    """Starts with full steps, tries views when the estimate is good, keeps them while they pay.

    A tail costs each of its tokens a second row, and is lost from its first wrong token on. On a
    CPU over a short context no view makes up for that; the estimate shows it without a trial.
    `cost(rows)`: seconds of a pass without context (None: unknown, so views are tried).
    `rows_cost`: the time of attention grows with the rows.
    """

    def __init__(self, cost: Callable[[int], float] | None, *, rows_cost: bool) -> None:
        self._cost, self._rows_cost = cost, rows_cost
        self.viewing = False
        self.trials = 0
        self._trial = False
        self._tail = [0, 0.0, 0]  # tokens, seconds and partial steps since the last confirmation
        self._rest, self._rested = _REST, _REST
        self._credit = 0.0  # seconds that trials may lose
        self._begin_watching()

    def _begin_watching(self) -> None:
        self._full, self._drafting, self._partial = _mean(), _mean(), _mean()
        self._tokens, self._rows, self._fed = _mean(), _mean(), _mean()
        self._viewed = _mean()  # tokens a second of whole tails

    def begin(self) -> None:
        """Starts a call: no tail is waiting, and its first steps are measured again."""
        if self.viewing and self._trial:
            self.viewing = False
        self._trial, self._tail = False, [0, 0.0, 0]
        if not self.viewing:
            self._begin_watching()

    @property
    def hurry(self) -> bool:
        """Whether the tail must be confirmed now, because a trial has enough steps."""
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
        """Notes a full step that gave a request `tokens`. Returns True to switch to views."""
        self._full.add(seconds)
        self._drafting.add(drafting)
        self._tokens.add(tokens)
        self._rows.add(rows)
        self._rested += tokens
        self._credit += _SHARE * seconds
        if self._full.count < _WATCHED or self._rested < self._rest:
            return False
        if self._cost is not None and self.promise(size, context) < _PROMISE:
            self._rested = 0  # tried again later: contexts grow
            return False
        if self._credit < _TRIAL_LOSS * self._full.value:
            return False
        self._credit = 0.0
        self._trial, self._tail = True, [0, 0.0, 0]
        self.trials += 1
        return True

    def promise(self, size: CallSizes, context: int) -> float:
        """Estimated gain of views that are never wrong: tokens a second relative to full steps."""
        rows, batch = max(1.0, self._rows.value), size.batch
        alone = self._cost(round(rows * batch))
        attention = max(0.0, self._full.value - self._drafting.value - alone)
        partial = self._full.value - attention * max(0.0, 1 - size.view_tokens / context)
        tail = max(1.0, size.tail_rows - rows)
        more = (self._cost(round((rows + tail) * batch)) - alone) / tail
        more += attention / rows / (1 if self._rows_cost else _FREE_ROWS)
        return self._gain(partial, more, tail)

    def _gain(self, partial: float, more: float, tail: float) -> float:
        """Gain of tails of `tail` tokens; `partial`, `more`: seconds of a step, of a row more."""
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
        """Notes a full step over tails of `fed` tokens. Returns True to switch to full steps."""
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
