"""Lookups in a request's own tokens: what followed the last time these tokens were seen.

Many tokens at once, a prompt, are sorted: a step waits for it, and Python would take hundreds of
milliseconds for a long one. The few that each step adds go into a table. Drafts are no part of
either; a lookup may go on from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_SIZES = (4, 3, 2)  # the longest match counts
_MANY = 256  # tokens that are sorted rather than inserted one by one


class NgramIndex:
    """N-grams of one request's confirmed tokens and where they last ended. Thread-safety: none."""

    def __init__(self) -> None:
        self._text = np.zeros(0, np.int32)  # with room behind the tokens
        self._length = 0
        self._sorted = SortedNgrams(self._text)  # of the first tokens
        self._ends: dict[tuple[int, ...], int] = {}  # of those behind them
        self._indexed = 0  # tokens whose n-grams are in

    def __len__(self) -> int:
        return self._length

    @property
    def last(self) -> int:
        """The latest confirmed token. REQUIRES: there is one."""
        return int(self._text[self._length - 1])

    def extend(self, tokens: Sequence[int] | np.ndarray) -> None:
        """Appends confirmed tokens."""
        self._append(tokens)
        # The last n-gram stays out: it is what is looked up, and must not find itself.
        end = self._length - 1
        if end - self._indexed >= _MANY:
            self._sorted = SortedNgrams(self._text[:end])
            self._ends = {}
        else:
            self._insert(end)
        self._indexed = max(self._indexed, end)

    def lookup(self, drafts: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow the confirmed ones and `drafts`."""
        if count <= 0:
            return []
        recent = [*self._tokens(self._length - _SIZES[0], self._length), *drafts][-_SIZES[0] :]
        for size in _SIZES:
            if len(recent) < size:
                continue
            # What is in the table ended later.
            stop = self._ends.get(tuple(recent[-size:])) or self._sorted.last_end(recent[-size:])
            if stop:
                return self._tokens(stop, stop + count)
        return []

    def _append(self, tokens: Sequence[int] | np.ndarray) -> None:
        length = self._length + len(tokens)
        if length > len(self._text):
            text = np.zeros(length + length // 4, np.int32)
            text[: self._length] = self._text[: self._length]
            self._text = text
        self._text[self._length : length] = tokens
        self._length = length

    def _insert(self, end: int) -> None:
        """The n-grams that end behind those indexed, up to `end`, into the table."""
        first = max(0, self._indexed + 1 - _SIZES[0])
        tokens = self._tokens(first, end)
        for size in _SIZES:
            for stop in range(max(size, self._indexed + 1), end + 1):
                self._ends[tuple(tokens[stop - size - first : stop - first])] = stop

    def _tokens(self, begin: int, end: int) -> list[int]:
        return self._text[max(0, begin) : min(end, self._length)].tolist()


class SortedNgrams:
    """N-grams of 2 to 4 tokens of a text, sorted from their last token to their first.

    Those with the same last tokens stand together, so a lookup takes a few binary searches and one
    look at the places that match.
    """

    def __init__(self, text: np.ndarray) -> None:
        # Tokens from 1 on: 0 stands before the text.
        padded = np.concatenate([np.zeros(2, np.int64), text.astype(np.int64) + 1])
        self._pairs, ranks = np.unique(_number(padded[1:], padded[:-1]), return_inverse=True)
        # Of the last two tokens and the two before them. The first pair ends before any token.
        keys = _number(ranks[2:], ranks[:-2])
        order = np.argsort(keys)
        self._keys = keys[order]
        self._ends = order + 2

    def last_end(self, ngram: Sequence[int]) -> int:
        """Where 2 to 4 tokens ended the last time; 0: they are not there."""
        *before, second, last = (token + 1 for token in ngram)
        rank, behind = self._pairs.searchsorted(_bounds([second, last]))
        if rank == behind:
            return 0
        begin, end = self._keys.searchsorted(
            _number(rank, self._pairs.searchsorted(_bounds(before)))
        )
        return int(self._ends[begin:end].max(initial=0))


def _number(major: Any, minor: Any) -> Any:
    """One number of two below 2**31, in their order."""
    return (major << 31) + minor


def _bounds(tokens: list[int]) -> np.ndarray:
    """The first number of a pair that ends with so many tokens, and the first behind all such."""
    if not tokens:
        return np.array([0, np.iinfo(np.int64).max])
    if len(tokens) == 1:
        return np.array([_number(tokens[0], 0), _number(tokens[0] + 1, 0)])
    first = _number(tokens[1], tokens[0])
    return np.array([first, first + 1])
