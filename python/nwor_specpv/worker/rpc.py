"""Imports gRPC and builds handlers and stubs from the descriptor of target.proto."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# The same as the extra `worker` in pyproject.toml.
INSTALL = (
    'pip install "grpcio>=1.62" "grpcio-health-checking>=1.62" "grpcio-reflection>=1.62" '
    '"protobuf>=4.25"'
)

try:
    import grpc

    from . import target_pb2 as messages
except ModuleNotFoundError as error:
    missing = "grpcio" if error.name == "grpc" else "protobuf"
    raise ModuleNotFoundError(
        f"the target worker needs {missing}, which is not installed: {INSTALL}", name=error.name
    ) from None

__all__ = ["CALLS", "INSTALL", "SERVICE_NAME", "grpc", "handlers", "messages", "stubs"]

_SERVICE = messages.DESCRIPTOR.services_by_name["Target"]
SERVICE_NAME = _SERVICE.full_name
CALLS = tuple(method.name for method in _SERVICE.methods)


def handlers(behaviours: dict[str, Callable[[Any, Any], Any]]) -> Any:
    """For a server: the handler of each call, from functions by name."""
    return grpc.method_handlers_generic_handler(
        _SERVICE.full_name,
        {
            method.name: grpc.unary_unary_rpc_method_handler(
                behaviours[method.name],
                request_deserializer=_message(method.input_type).FromString,
                response_serializer=_message(method.output_type).SerializeToString,
            )
            for method in _SERVICE.methods
        },
    )


def stubs(channel: Any) -> dict[str, Any]:
    """For a client: the stub of each call, by name."""
    return {
        method.name: channel.unary_unary(
            f"/{_SERVICE.full_name}/{method.name}",
            request_serializer=_message(method.input_type).SerializeToString,
            response_deserializer=_message(method.output_type).FromString,
        )
        for method in _SERVICE.methods
    }


def _message(descriptor: Any) -> Any:
    return getattr(messages, descriptor.name)
