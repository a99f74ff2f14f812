"""What one call may ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nwor_specpv.errors import NworError

_MAX_NAME = 256  # characters
_MAX_STOP_IDS = 256
_INTEGER_BYTES = 10  # most that an integer takes in a message
_CHARACTER_BYTES = 4
_OTHER_BYTES = 1024


@dataclass(frozen=True)
class Limits:
    """Of one call, and `max_calls` of all at once."""

    max_tree_rows: int = 256
    max_prompt_tokens: int = 8192
    max_calls: int = 256

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise NworError(f"{name}: got {value}, expected 1 or more")

    @property
    def message_bytes(self) -> int:
        """The largest message that a call within the limits can be."""
        integers = self.max_prompt_tokens + 2 * self.max_tree_rows + _MAX_STOP_IDS
        return integers * _INTEGER_BYTES + _MAX_NAME * _CHARACTER_BYTES + _OTHER_BYTES

    def check(self, request: Any) -> None:
        """Raises NworError unless a VerifyDraftsRequest is within them."""
        for name, got, most, what in (
            ("session", len(request.session), _MAX_NAME, "characters"),
            ("tree", len(request.tree.tokens), self.max_tree_rows, "rows"),
            ("parents", len(request.tree.parents), self.max_tree_rows, "rows"),
            ("new_tokens", len(request.new_tokens), self.max_prompt_tokens, "tokens"),
            ("stop_ids", len(request.stop_ids), _MAX_STOP_IDS, "tokens"),
        ):
            if got > most:
                raise NworError(f"{name}: got {got} {what}, expected at most {most}")
