"""The target worker serves a model's sessions over gRPC to drafters in other processes.

    nwor-specpv worker --port 50051                    # where the target is

    from nwor_specpv.worker import Client              # where the drafter is
    with Client("127.0.0.1:50051") as client, client.session("s") as session:
        result = session.verify(tree, prompt)

Only this folder imports grpc, and only when one of its names is used (docs/worker.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client, RemoteResult, RemoteSession, WorkerInfo
    from .judging import Judge
    from .limits import Limits
    from .security import ServerSecurity
    from .server import Server
    from .status_codes import WorkerError

__all__ = [
    "Client",
    "Judge",
    "Limits",
    "RemoteResult",
    "RemoteSession",
    "Server",
    "ServerSecurity",
    "WorkerError",
    "WorkerInfo",
]

_MODULES = {
    "Judge": "judging",
    "Limits": "limits",
    "Server": "server",
    "ServerSecurity": "security",
    "WorkerError": "status_codes",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'client')}"), name)
