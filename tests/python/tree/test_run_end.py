"""Where a run of tokens ends: at a stop token or at the limit."""

from __future__ import annotations

import pytest

from nwor_specpv import _C


@pytest.mark.parametrize(
    ("run", "room", "expected"),
    [
        ([5, 6, 7], 9, (3, None)),
        ([5, 6, 7], 3, (3, "length")),
        ([5, 6, 7], 2, (2, "length")),
        ([5, 2, 7], 9, (2, "stop")),  # the stop token is emitted
        ([5, 6, 2], 3, (3, "stop")),
        ([5, 6, 2], 2, (2, "length")),
        ([2, 2], 1, (1, "stop")),
        ([5, 1, 2], 9, (2, "stop")),
        ([], 4, (0, None)),
        ([], 0, (0, "length")),
    ],
)
def test_a_run_ends_at_a_stop_token_or_at_the_limit(
    run: list[int], room: int, expected: tuple[int, str | None]
) -> None:
    assert _C.find_run_end(run, {1, 2}, room) == expected
