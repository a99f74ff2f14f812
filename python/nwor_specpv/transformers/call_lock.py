"""One call at a time: other threads wait, and a call inside a call is refused."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

from nwor_specpv import NworError


class CallLock:
    """A lock that knows its thread. Used as `with lock:`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident():
            raise NworError(
                "generate: got a call from inside another one, of on_token or a callback; expected "
                "the first to end: use another Generator of the same model inside"
            )
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._owner = None
        self._lock.release()


_of_objects: WeakKeyDictionary[Any, CallLock] = WeakKeyDictionary()
_guard = threading.Lock()


def lock_of(shared: Any) -> CallLock:
    """The lock of an object that several generators may have, such as a drafter."""
    with _guard:
        return _of_objects.setdefault(shared, CallLock())
