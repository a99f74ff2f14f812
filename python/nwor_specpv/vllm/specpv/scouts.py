"""What lookups would guess, watched whether steps verify guesses or not.

Plain steps say nothing of guesses, and a probe of guesses costs time. So the texts of a few
requests are on the host, too. A lookup guesses what follows, and the tokens that come say how many
of its guesses were right: as many as a step that verifies them accepts, at any temperature. That
takes microseconds, as the trials are in C++.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nwor_specpv import _C

_MOST = 8  # requests that are watched
_INTERVAL = 4  # steps between two looks at them
_FEWEST = 3  # trials that say something of a request
_TEXT = 32768  # latest tokens of a text, and of all texts that are read in one look: 5 ms


class _Scout:
    """A request: its text, and how many of the latest guesses have been right."""

    def __init__(self, text: Sequence[int], limit: int, lengths: tuple[int, int]) -> None:
        self._left_out = max(0, len(text) - _TEXT)
        self.trials = _C.NgramTrials(*lengths, limit, text[self._left_out :])

    def follow(self, text: Sequence[int]) -> None:
        """Takes in the tokens that the text has got since."""
        self.trials.follow(text[self._left_out + len(self.trials) :])


class Scouts:
    """Of one scheduler. Thread-safety: none."""

    def __init__(self, limit: int, lengths: tuple[int, int]) -> None:
        """`limit`: guesses at most. `lengths`: tokens of a match, at least and at most."""
        self._limit, self._lengths = limit, lengths
        self._scouts: dict[str, _Scout] = {}
        self._steps = 0

    def look(self, names: Iterable[str], requests: Mapping[str, Any]) -> None:
        """After a step of these requests."""
        self._steps += 1
        if self._steps % _INTERVAL:
            return
        for name in [name for name in self._scouts if name not in requests]:
            del self._scouts[name]
        for name, scout in self._scouts.items():
            scout.follow(requests[name].all_token_ids)
        room = _TEXT
        for name in names:
            if len(self._scouts) == _MOST or room <= 0:
                return
            if name not in self._scouts and name in requests:
                text = requests[name].all_token_ids
                self._scouts[name] = _Scout(text, self._limit, self._lengths)
                room -= len(text)

    def tokens(self, drafts: int) -> tuple[float, float] | None:
        """Tokens that a step with so many guesses yields for a request, and their error. None: too
        few are known."""
        told = [scout.trials.moments(drafts) for scout in self._scouts.values()]
        told = [found for found in told if found[0] >= _FEWEST]
        if not told or 2 * len(told) < len(self._scouts):
            return None
        mean, between = _moments([own for _, own, _ in told])
        inside = sum(spread / count for count, _, spread in told)
        return 1.0 + mean, math.sqrt((inside / len(told) + between) / len(told))


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and variance; those of `statistics` take ten times as long."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / len(values)
