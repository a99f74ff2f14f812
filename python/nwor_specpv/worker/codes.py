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
_MOST_DETAILS_BYTES = 6000  # they travel as a header, and 8 KiB is what those may take


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
    text = " ".join(str(error).split()).encode(errors="replace").decode()
    if isinstance(error, WorkerStoppingError):
        return grpc.StatusCode.UNAVAILABLE, text
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, _cut(text)
    told = f"the target failed, the worker's log has more: {type(error).__name__}: {text}"
    return grpc.StatusCode.INTERNAL, _cut(told)


def _cut(text: str) -> str:
    """As much as fits when gRPC has written three bytes for each that is not plain ASCII."""
    room = _MOST_DETAILS_BYTES
    for index, character in enumerate(text):
        plain = " " <= character <= "~" and character != "%"
        room -= 1 if plain else 3 * len(character.encode())
        if room < 0:
            return text[:index]
    return text


def error_of(error: grpc.RpcError, address: str) -> NworError:
    """What a client raises."""
    code, details = error.code(), error.details() or "no details"
    for kind, known in _CODES:
        if code is known:
            return kind(details)
    return WorkerError(f"worker at {address}: {code.name}: {details}", code.name)
