"""What lookups would guess, watched whether steps verify guesses or not.

Plain steps say nothing of guesses, and a probe of guesses costs time. So the texts of a few
requests are on the host, too. A lookup guesses what follows, and the tokens that come say how many
of its guesses were right: as many as a step that verifies them accepts, at any temperature. That
takes microseconds, as the index is in C++.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nwor_specpv import _C

_MOST = 8  # requests that are watched
_INTERVAL = 4  # steps between two looks at them
_WINDOW = 32  # latest tokens of a text whose trials count
_FEWEST = 3  # trials that say something of a request; so many count, however long they are
_TEXT = 32768  # latest tokens of a text, and of all texts that are read in one look: 5 ms


class _Scout:
    """A request: its text, and how many of the latest guesses have been right."""

    def __init__(self, text: Sequence[int], limit: int, lengths: tuple[int, int]) -> None:
        self._index = _C.NgramIndex(*lengths)
        self._left_out = max(0, len(text) - _TEXT)
        self._index.append(text[self._left_out :])
        self._limit = limit
        self._guesses, self.right = self._index.lookup([], limit), 0
        self.trials: deque[int] = deque()
        self._tokens = 0  # of the trials

    def follow(self, text: Sequence[int]) -> None:
        """Takes in the tokens that the text has got since."""
        tokens, begin = text[self._left_out + len(self._index) :], 0
        for end, token in enumerate(tokens, 1):
            if self.right < len(self._guesses) and self._guesses[self.right] == token:
                self.right += 1
                continue
            self._index.append(tokens[begin:end])
            begin = end
            self._note(self.right)
            self._guesses, self.right = self._index.lookup([], self._limit), 0
        if begin < len(tokens):
            self._index.append(tokens[begin:])

    def _note(self, right: int) -> None:
        """A trial takes as many tokens as were right, and one."""
        self.trials.append(right)
        self._tokens += right + 1
        while len(self.trials) > _FEWEST and self._tokens - self.trials[0] - 1 >= _WINDOW:
            self._tokens -= self.trials.popleft() + 1

    def results(self) -> list[int]:
        """Of its trials, the one that is not over yet among them if it is the best."""
        found = list(self.trials)
        return [*found, self.right] if self.right > max(found, default=0) else found


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
        results = [scout.results() for scout in self._scouts.values()]
        results = [found for found in results if len(found) >= _FEWEST]
        if not results or 2 * len(results) < len(self._scouts):
            return None
        told = [_moments([min(right, drafts) for right in found]) for found in results]
        mean, between = _moments([own for own, _ in told])
        inside = sum(spread / len(found) for (_, spread), found in zip(told, results, strict=True))
        return 1.0 + mean, math.sqrt((inside / len(told) + between) / len(told))


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and variance; those of `statistics` take ten times as long."""
    mean = sum(values) / len(values)
    return mean, sum((value - mean) ** 2 for value in values) / len(values)
