"""Limits on one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nwor_specpv.errors import NworError

_MAX_NAME = 256  # characters
_MAX_STOP_IDS = 256
_INTEGER_BYTES = 10  # the most bytes of an integer in a message
_CHARACTER_BYTES = 4
_OTHER_BYTES = 1024
_MOST_BYTES = 2**31 - 1  # gRPC's limit on a message


@dataclass(frozen=True)
class Limits:
    """The largest call; `max_calls`: VerifyDrafts at once, and as many EndSession."""

    max_tree_rows: int = 256
    max_prompt_tokens: int = 8192
    max_calls: int = 256
    max_distribution_bytes: int = 16 << 20  # 0: calls have no distributions

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 0 if name == "max_distribution_bytes" else 1
            if value < least:
                raise NworError(f"{name}: got {value}, expected {least} or more")
        if self.message_bytes > _MOST_BYTES:
            raise NworError(
                "max_tree_rows, max_prompt_tokens, max_distribution_bytes: got "
                f"{self.max_tree_rows}, {self.max_prompt_tokens} and "
                f"{self.max_distribution_bytes}, messages of {self.message_bytes} bytes, expected "
                f"at most {_MOST_BYTES}"
            )

    @property
    def message_bytes(self) -> int:
        """The size of the largest message within the limits."""
        integers = self.max_prompt_tokens + 2 * self.max_tree_rows + _MAX_STOP_IDS
        fixed = _MAX_NAME * _CHARACTER_BYTES + _OTHER_BYTES
        return integers * _INTEGER_BYTES + fixed + self.max_distribution_bytes

    def check(self, request: Any) -> None:
        """Raises NworError unless a VerifyDraftsRequest is within the limits."""
        self.check_name(request.session)
        for name, got, most, what in (
            ("tree", len(request.tree.tokens), self.max_tree_rows, "rows"),
            ("parents", len(request.tree.parents), self.max_tree_rows, "rows"),
            ("new_tokens", len(request.new_tokens), self.max_prompt_tokens, "tokens"),
            ("stop_ids", len(request.stop_ids), _MAX_STOP_IDS, "tokens"),
            (
                "distributions",
                request.distributions.ByteSize(),
                self.max_distribution_bytes,
                "bytes",
            ),
        ):
            if got > most:
                raise NworError(f"{name}: got {got} {what}, expected at most {most}")

    def check_name(self, session: str) -> None:
        """Raises NworError when the name is too long."""
        if len(session) > _MAX_NAME:
            raise NworError(f"session: got {len(session)} characters, expected at most {_MAX_NAME}")
