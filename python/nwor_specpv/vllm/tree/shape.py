"""How large a draft tree is and how it is grown. Pure functions."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from nwor_specpv import MAX_TREE_ROWS
from nwor_specpv.errors import NworError

# Rows that trees may have where measured speed decides. The smallest are hardly more than chains.
ARM_ROWS = (4, 8, 16, 32, 64)
# Rows of a step with larger trees than the smallest: so many vLLM captures CUDA graphs for.
MOST_ROWS = 512

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


def arms_of_batch(batch: int, room: int) -> list[int]:
    """Rows that the trees of so many requests may have, in a step that has `room` for so many."""
    smallest = ARM_ROWS[0]
    return [
        rows
        for rows in ARM_ROWS
        if batch * rows <= (room if rows == smallest else min(room, MOST_ROWS))
    ]


def rows_of_step(max_requests: int, room: int) -> int:
    """Rows of the largest step of up to so many requests where measured speed decides."""
    possible = [room // ARM_ROWS[0], *(min(room, MOST_ROWS) // rows for rows in ARM_ROWS[1:])]
    return max(
        rows * min(most, max_requests) for rows, most in zip(ARM_ROWS, possible, strict=True)
    )


@functools.cache
def shape_of(rows: int) -> TreeShape:
    """The shape of trees of so many rows: 5 levels for 8 rows, one more whenever rows double."""
    if not 2 <= rows <= MAX_TREE_ROWS:
        raise NworError(f"draft_tree: got {rows} rows, expected 2 to {MAX_TREE_ROWS}")
    depth = min(rows - 1, rows.bit_length() + 1)
    width = max(1, min(_MOST_CHILDREN, rows // 2, _MOST_KEPT // max(1, depth - 1)))
    return TreeShape(rows, depth, width)
