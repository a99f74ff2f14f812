"""How large a draft tree is and how it is grown. Pure functions."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from nwor_specpv import MAX_TREE_ROWS
from nwor_specpv.errors import NworError

# Rows of a tree by the number of requests, as (first, last, rows): about 128 rows in a step. The
# last entry is for more requests, too; such small trees are hardly more than chains.
ROWS_BY_REQUESTS = ((1, 1, 64), (2, 4, 32), (5, 8, 16), (9, 16, 8), (17, 17, 4))

# Children of a row that are looked at, at most.
_MOST_CHILDREN = 8
# The head runs over all rows that it has kept; their mask is one word.
_MOST_KEPT = 64


@dataclass(frozen=True)
class TreeShape:
    """A tree of `rows` rows, its root included, at most `depth` tokens deep. In each level the head
    keeps the `width` likeliest rows, and looks at as many children of each."""

    rows: int
    depth: int
    width: int

    @property
    def words(self) -> int:
        """64-bit words of a row's mask."""
        return -(-self.rows // 64)


def rows_of_step(max_requests: int) -> int:
    """Rows of the largest step of up to so many requests where rows are chosen by their number."""
    found = [rows * min(last, max_requests) for first, last, rows in ROWS_BY_REQUESTS
             if first <= max_requests]  # fmt: skip
    return max(*found, max_requests * ROWS_BY_REQUESTS[-1][2])


@functools.cache
def shape_of(rows: int) -> TreeShape:
    """The shape of trees of so many rows: 5 levels for 8 rows, one more whenever rows double."""
    if not 2 <= rows <= MAX_TREE_ROWS:
        raise NworError(f"draft_tree: got {rows} rows, expected 2 to {MAX_TREE_ROWS}")
    depth = min(rows - 1, rows.bit_length() + 1)
    width = max(1, min(_MOST_CHILDREN, rows // 2, _MOST_KEPT // max(1, depth - 1)))
    return TreeShape(rows, depth, width)
