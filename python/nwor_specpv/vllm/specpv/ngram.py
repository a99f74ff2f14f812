"""Lookups in a request's own tokens: what followed the last time these tokens were seen.

The index grows with the request, so a lookup costs the same at any length. Drafts are no part of
it; a lookup may go on from them.
"""

from __future__ import annotations

from collections.abc import Sequence

_SIZES = (4, 3, 2)  # the longest match counts


class NgramIndex:
    """N-grams of one request's confirmed tokens and where they last ended."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # tokens whose n-grams are in

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def last(self) -> int:
        """The latest confirmed token. REQUIRES: there is one."""
        return self._tokens[-1]

    def extend(self, tokens: Sequence[int]) -> None:
        """Appends confirmed tokens."""
        self._tokens.extend(tokens)
        # The last n-gram stays out: it is what is looked up, and must not find itself.
        end = len(self._tokens) - 1
        for size in _SIZES:
            for stop in range(max(size, self._indexed + 1), end + 1):
                self._ends[tuple(self._tokens[stop - size : stop])] = stop
        self._indexed = max(self._indexed, end)

    def lookup(self, drafts: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow the confirmed ones and `drafts`."""
        if count <= 0:
            return []
        recent = [*self._tokens[-_SIZES[0] :], *drafts][-_SIZES[0] :]
        for size in _SIZES:
            if len(recent) < size:
                continue
            stop = self._ends.get(tuple(recent[-size:]))
            if stop is not None:
                return self._tokens[stop : stop + count]
        return []
