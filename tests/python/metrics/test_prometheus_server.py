"""A Prometheus server scrapes the endpoint and answers the ratios of docs/metrics.md."""

from __future__ import annotations

import http
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from nwor_specpv import BYPASS_REASONS, Metrics
from tests.python.metrics.rounds import play

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 300.0


class Server:
    """Prometheus on loopback, scraping one target every second."""

    def __init__(self, program: str, folder: Path, target: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            "scrape_configs:\n"
            "- job_name: nwor\n"
            f"  static_configs: [{{targets: ['127.0.0.1:{target}']}}]\n"
        )
        self.log = folder / "prometheus.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def query(self, expression: str) -> list[dict]:
        query = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{query}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]["result"]

    def value(self, expression: str) -> float | None:
        """The only sample of the answer, or None while there is none."""
        try:
            found = self.query(expression)
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:  # it has just been started
                return None
            pytest.fail(f"{expression}: {error.read().decode()}")
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None
        return float(found[0]["value"][1]) if len(found) == 1 else None

    def wait_for(self, expression: str, expected: float) -> None:
        deadline = time.monotonic() + PATIENCE_S
        value = None
        while time.monotonic() < deadline and self.process.poll() is None:
            value = self.value(expression)
            if value is not None and abs(value - expected) <= 1e-9 * max(1.0, abs(expected)):
                return
            time.sleep(0.2)
        pytest.fail(f"{expression}: got {value}, expected {expected}\n{self.log.read_text()}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: prometheus)")
    metrics = Metrics()
    started = Server(program, tmp_path, metrics.serve())
    yield started
    started.stop()
    metrics.stop()


def documented_queries() -> list[str]:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```promql\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def test_a_server_scrapes_and_agrees_with_the_snapshot(server: Server) -> None:
    seed = int(os.environ.get("NWOR_TEST_SEED") or secrets.randbits(32))
    print(f"seed={seed}")
    server.wait_for("up", 1)
    _interceptor, _books = play(40, seed)
    snapshot = Metrics().snapshot()
    for name, value in snapshot.items():
        if name.startswith("nwor_") and isinstance(value, int | float):
            server.wait_for(name, value)
    server.wait_for("count(nwor_fallback_total)", len(BYPASS_REASONS) - 1)  # all but "none"
    server.wait_for("count(nwor_build_info)", 1)
    committed, staged = (snapshot[f"nwor_{x}_tokens_total"] for x in ("committed", "staged"))
    server.wait_for("nwor_committed_tokens_total / nwor_staged_tokens_total", committed / staged)
    queries = documented_queries()
    assert len(queries) >= 4
    for query in queries:
        server.value(query)  # fails on what the server cannot parse
