"""The process-wide counters, and the Prometheus endpoint over them.

    metrics = Metrics()
    port = metrics.serve(port=9400)        # loopback; 0: any free port
    print(metrics.snapshot()["nwor_rounds_total"])

Nothing listens until `serve` is called. Call it in the process that does the work: a forked or
spawned worker counts for itself and serves nothing until asked.
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
    """A view of this process' counters; every instance sees the same ones. Thread-safe."""

    def snapshot(self) -> dict[str, Any]:
        """Every counter by its metric name. May wait for the device: commits count there."""
        return _C.metrics_snapshot()

    def serve(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Starts the endpoint and returns the bound port, the same one when asked again.

        A port that cannot be had is logged, shown in `status()` and answered with -1; it never
        stops the host. Raises NworError for a bad address, or a build without prometheus-cpp.
        """
        bound = _C.metrics_serve(host, port)
        if bound < 0:
            logger.warning("%s", self.status()["problem"])
        else:
            logger.info("metrics at %s", metrics_url(host, bound))
        return bound

    def serve_settings(self, settings: Settings, env: Mapping[str, str] = os.environ) -> int | None:
        """`serve` as configured, each worker of a machine at its own port; None when it is off."""
        if settings.metrics_port is None:
            return None
        return self.serve(settings.metrics_host, worker_port(settings.metrics_port, env))

    def stop(self) -> None:
        """Stops the endpoint; the counters go on."""
        _C.metrics_stop()

    def status(self) -> dict[str, Any]:
        """`built`, `serving`, `host`, `port`, and `problem`: why the last `serve` failed."""
        return _C.metrics_status()

    def render(self) -> str:
        """The text a scrape would get."""
        return _C.metrics_render()


def worker_port(base: int, env: Mapping[str, str] = os.environ) -> int:
    """The base port plus LOCAL_RANK, where a launcher set it; 0 (any free port) stays 0."""
    text = env.get("LOCAL_RANK", "")
    rank = int(text) if base > 0 and text.isdecimal() else 0
    if rank > 0 and base + rank > PORT_MAX:
        raise NworError(
            f"metrics_port: got {base}, which is port {base + rank} for local rank {rank}, "
            f"expected at most {PORT_MAX - rank}"
        )
    return base + rank
