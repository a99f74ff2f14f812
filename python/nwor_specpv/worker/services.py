"""The standard services beside the worker's own: health and reflection; and who may call what."""

from __future__ import annotations

from typing import Any

from .rpc import INSTALL, SERVICE_NAME, grpc
from .security import ServerSecurity

try:
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection
except ModuleNotFoundError as error:
    missing = "grpcio-health-checking" if "health" in str(error.name) else "grpcio-reflection"
    raise ModuleNotFoundError(
        f"the target worker needs {missing}, which is not installed: {INSTALL}", name=error.name
    ) from None

_OPEN_CALL = f"/{health.SERVICE_NAME}/Check"
_DENIED = (
    "the bearer token is missing or wrong; the client sends it as token=, from NWOR_WORKER_TOKEN "
    "or NWOR_WORKER_TOKEN_FILE"
)


class Health:
    """grpc.health.v1 of a server: serving until `stop`."""

    def __init__(self, server: Any) -> None:
        self._servicer = health.HealthServicer()
        for name in ("", SERVICE_NAME):
            self._servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def stop(self) -> None:
        """Says NOT_SERVING from now on."""
        self._servicer.enter_graceful_shutdown()


def add_reflection(server: Any) -> None:
    names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


class TokenCheck(grpc.ServerInterceptor):
    """Refuses calls without the token. Probes have none, so a check of health needs none; a watch
    does, because it stays.
    """

    def __init__(self, security: ServerSecurity, denied: Any) -> None:
        """`denied()` is called for each refused call."""
        self._security, self._denied = security, denied

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        metadata = dict(details.invocation_metadata or ())
        if details.method == _OPEN_CALL or self._security.admits(metadata):
            return continuation(details)
        handler = continuation(details)
        if handler is None:  # no such call, which gRPC says
            return None

        def refuse(request: Any, context: Any) -> Any:
            self._denied()
            return context.abort(grpc.StatusCode.UNAUTHENTICATED, _DENIED)

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(refuse)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(refuse)
        return grpc.unary_unary_rpc_method_handler(refuse)
