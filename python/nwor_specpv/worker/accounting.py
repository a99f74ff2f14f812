"""Counts calls, their bytes and their time in the process' metrics."""

from __future__ import annotations

import time
from typing import Any

from nwor_specpv import _C

from .rpc import grpc

_OUTCOMES = {
    grpc.StatusCode.FAILED_PRECONDITION: "refused",
    grpc.StatusCode.NOT_FOUND: "refused",
    grpc.StatusCode.INVALID_ARGUMENT: "refused",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "busy",
    grpc.StatusCode.UNAVAILABLE: "stopping",
    grpc.StatusCode.CANCELLED: "abandoned",
    grpc.StatusCode.INTERNAL: "failed",
}


class CallAccount:
    """One call, from its message to its answer."""

    def __init__(self, request: Any) -> None:
        self._begun, self._received = time.monotonic(), request.ByteSize()

    def answered(self, reply: Any) -> None:
        """Counts a call with its result."""
        waited = getattr(reply, "wait_us", 0) * 1e-6
        self._count("answered", reply.ByteSize(), waited)

    def failed(self, code: grpc.StatusCode) -> None:
        """Counts a call that gets a status instead."""
        self._count(_OUTCOMES[code], 0, 0.0)

    def _count(self, outcome: str, sent: int, waited: float) -> None:
        _C.count_worker_call(outcome, self._received, sent, time.monotonic() - self._begun, waited)


def count_unauthenticated() -> None:
    """Counts a call without the token; its message is not looked at."""
    _C.count_worker_call("unauthenticated", 0, 0, 0.0, 0.0)
