"""Errors as gRPC carries them, there and back."""

from __future__ import annotations

from nwor_specpv.errors import CapacityError, DesyncError, NworError, UnknownSessionError

from .rpc import grpc

# Of several that fit the first counts.
_CODES = (
    (DesyncError, grpc.StatusCode.FAILED_PRECONDITION),
    (UnknownSessionError, grpc.StatusCode.NOT_FOUND),
    (CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NworError, grpc.StatusCode.INVALID_ARGUMENT),
)
_MOST_DETAILS = 2000  # characters; they travel as a header, and 8 KiB is what those may take


class WorkerError(NworError):
    """The call has failed, not its arguments: no worker there, no time left, or a model that broke.

    `code`: gRPC's name of it, such as "UNAVAILABLE".
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class WorkerStoppingError(Exception):
    """This call came too late to be run."""


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """What a client is told."""
    text = " ".join(str(error).split())
    if isinstance(error, WorkerStoppingError):
        return grpc.StatusCode.UNAVAILABLE, text
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, text[:_MOST_DETAILS]
    told = f"the target failed, the worker's log has more: {type(error).__name__}: {text}"
    return grpc.StatusCode.INTERNAL, told[:_MOST_DETAILS]


def error_of(error: grpc.RpcError, address: str) -> NworError:
    """What a client raises."""
    code, details = error.code(), error.details() or "no details"
    for kind, known in _CODES:
        if code is known:
            return kind(details)
    return WorkerError(f"worker at {address}: {code.name}: {details}", code.name)
