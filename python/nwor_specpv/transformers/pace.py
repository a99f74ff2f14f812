"""Whether lossless partial verification pays, found out while it runs."""

from __future__ import annotations

_TAILS = 2  # judged tails of a trial
_SETTLED_TOKENS = 256  # tokens with the better way before the other is tried again


class Pacer:
    """Takes turns: some tails with views, as many tokens without; then the faster of both.

    A tail costs its tokens twice, and a model whose attention a view misses loses them: then full
    steps alone are faster, and they are what remains.
    """

    def __init__(self) -> None:
        self.viewing = True
        self._rates: dict[bool, float] = {}
        self._tokens = 0
        self._seconds = 0.0
        self._tails = 0
        self._trial = True
        self._wanted = 8

    def note(self, tokens: int, seconds: float, confirmed: bool) -> bool:
        """A step showed `tokens`. True: views and full steps change places when tails are empty."""
        self._tokens += tokens
        self._seconds += seconds
        self._tails += confirmed
        if self._trial:
            over = self._tails >= _TAILS if self.viewing else self._tokens >= self._wanted
        else:
            over = self._tokens >= _SETTLED_TOKENS
        if not over or self._tokens == 0:
            return False
        self._rates[self.viewing] = self._tokens / max(self._seconds, 1e-9)
        self._wanted = max(8, self._tokens)
        self._tokens, self._seconds, self._tails = 0, 0.0, 0
        if len(self._rates) < 2:
            return True  # now the other way
        better = self._rates[True] >= self._rates[False]
        if not self._trial:  # settled for long enough: both are tried again
            self._rates.clear()
        self._trial = not self._trial
        return better != self.viewing

    def switch(self) -> None:
        self.viewing = not self.viewing
