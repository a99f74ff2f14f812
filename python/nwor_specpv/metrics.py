"""The process-wide counters and their Prometheus endpoint.

    metrics = Metrics()
    port = metrics.serve(port=9400)        # on loopback; port 0: any free one
    print(metrics.snapshot()["nwor_rounds_total"])

The endpoint is off until `serve` is called. Call it in the process that does the work: a forked or
spawned worker has counters of its own and must call `serve` itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import _C
from .config import metrics_url
from .errors import NworError

if TYPE_CHECKING:
    from .config import Settings

logger = logging.getLogger("nwor_specpv")

PORT_MAX = 65535


class Metrics:
    """This process' counters. All instances share them. Thread-safe."""

    def snapshot(self) -> dict[str, Any]:
        """Every counter by its metric name. May wait for the GPU, where commits are counted."""
        return _C.metrics_snapshot()

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Starts the endpoint and returns its port. A second call returns the same port.

        If the port cannot be had, the call logs a warning, sets `problem` in `status()` and returns
        -1; the host goes on. Raises NworError for a bad address or a build without prometheus-cpp.
        """
        bound = _C.metrics_serve(host, port)
        if bound < 0:
            logger.warning("%s", self.status()["problem"])
        else:
            logger.info("metrics at %s", metrics_url(host, bound))
        return bound

    def serve_settings(self, settings: Settings, env: Mapping[str, str] = os.environ) -> int | None:
        """Calls `serve` with the configured address; each worker of a machine has its own port.

        Returns None if `metrics_port` is not set.
        """
        if settings.metrics_port is None:
            return None
        return self.serve(settings.metrics_host, worker_port(settings.metrics_port, env))

    def stop(self) -> None:
        """Stops the endpoint. The counters go on."""
        _C.metrics_stop()

    def status(self) -> dict[str, Any]:
        """The endpoint's state: `built`, `serving`, `host`, `port`, and `problem`, which says why
        the last `serve` failed.
        """
        return _C.metrics_status()

    def render(self) -> str:
        """The text that a scrape would get."""
        return _C.metrics_render()


def worker_port(base: int, env: Mapping[str, str] = os.environ) -> int:
    """The base port plus LOCAL_RANK, if a launcher set it. 0 (any free port) stays 0."""
    text = env.get("LOCAL_RANK", "")
    rank = int(text) if base > 0 and text.isdecimal() else 0
    if rank > 0 and base + rank > PORT_MAX:
        raise NworError(
            f"metrics_port: got {base}, which is port {base + rank} for local rank {rank}, "
            f"expected at most {PORT_MAX - rank}"
        )
    return base + rank
