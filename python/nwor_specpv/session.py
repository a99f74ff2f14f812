"""A client's handle of a session: the store, the name, and the cached length.

    with Session(store, "s") as session:
        result = session.verify(tree, prompt)          # the handle keeps expected_prefix_len
        result = session.verify(tree, [result.next_token])

The store's own `verify(session, tree, new_tokens, expected_prefix_len)` takes a name or a Session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .errors import UnknownSessionError

if TYPE_CHECKING:
    from ._C import DraftTree, SessionInfo, SessionStore, VerifyResult


class Session:
    """One sequence of a store. The handle is not thread-safe."""

    def __init__(self, store: SessionStore, name: str) -> None:
        self.store, self.name = store, name
        self.length = 0  # tokens cached, from the last result

    def __repr__(self) -> str:
        return f"Session({self.name!r}, length={self.length})"

    def verify(
        self,
        tree: DraftTree | None,
        new_tokens: Sequence[int],
        expected_prefix_len: int | None = None,
        **options: Any,
    ) -> VerifyResult:
        """`SessionStore.verify`; by default it expects the length of the last result."""
        expected = self.length if expected_prefix_len is None else expected_prefix_len
        result = self.store.verify(self.name, tree, list(new_tokens), expected, **options)
        self.length = result.length
        return result

    def rollback(self, length: int) -> None:
        """Keeps the first `length` cached tokens."""
        self.store.rollback(self.name, length)
        self.length = length

    def fork(self, name: str, num_tokens: int | None = None) -> Session:
        """Starts another session with the first tokens of this one (default: all)."""
        self.store.fork(self.name, name, num_tokens)
        other = Session(self.store, name)
        other.length = self.length if num_tokens is None else num_tokens
        return other

    def info(self) -> SessionInfo:
        """Describes the session. Raises UnknownSessionError when the store does not have it."""
        return self.store.info(self.name)

    def end(self) -> None:
        """Ends the session. Raises UnknownSessionError when the store does not have it."""
        self.store.end_session(self.name)
        self.length = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(UnknownSessionError):  # ended or evicted before
            self.end()
