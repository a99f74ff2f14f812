"""Converts errors to gRPC status codes and back."""

from __future__ import annotations

from nwor_specpv.errors import CapacityError, DesyncError, NworError, UnknownSessionError

from .rpc import grpc

# The first match counts.
_CODES = (
    (DesyncError, grpc.StatusCode.FAILED_PRECONDITION),
    (UnknownSessionError, grpc.StatusCode.NOT_FOUND),
    (CapacityError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (NworError, grpc.StatusCode.INVALID_ARGUMENT),
)
_MOST_DETAILS_BYTES = 6000  # details travel as a header, which may have 8 KiB


class WorkerError(NworError):
    """A call failed though its arguments were right: no worker, no time left, or a model error.

    `code`: gRPC's name of the status, such as "UNAVAILABLE".
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class WorkerStoppingError(Exception):
    """The worker is stopping and does not run this call."""


class CallAbandonedError(Exception):
    """The client has left, so nobody receives the answer."""


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """The status and the details that a client receives."""
    text = " ".join(str(error).split()).encode(errors="replace").decode()
    if isinstance(error, WorkerStoppingError):
        return grpc.StatusCode.UNAVAILABLE, text
    if isinstance(error, CallAbandonedError):
        return grpc.StatusCode.CANCELLED, text
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, _cut(text)
    details = f"the target failed, the worker's log has more: {type(error).__name__}: {text}"
    return grpc.StatusCode.INTERNAL, _cut(details)


def _cut(text: str) -> str:
    """Shortens the text; gRPC writes three bytes for each byte that is not plain ASCII."""
    room = _MOST_DETAILS_BYTES
    for index, character in enumerate(text):
        plain = " " <= character <= "~" and character != "%"
        room -= 1 if plain else 3 * len(character.encode())
        if room < 0:
            return text[:index]
    return text


def error_of(error: grpc.RpcError, address: str) -> NworError:
    """The error that a client raises."""
    code, details = error.code(), error.details() or "no details"
    for kind, known in _CODES:
        if code is known:
            return kind(details)
    return WorkerError(f"worker at {address}: {code.name}: {details}", code.name)
