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

    def wait_for_samples(self, expression: str) -> list[dict]:
        """The answer, as soon as there is one: a rate needs two scrapes."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            self.value(expression)  # fails on what the server cannot parse
            found = self.query(expression)
            if found:
                return found
            time.sleep(0.2)
        pytest.fail(f"{expression}: no answer\n{self.log.read_text()}")

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


def dashboard_queries() -> dict[str, list[str]]:
    """Queries by panel, with its variables as Grafana sets them."""
    path = ROOT / "deploy" / "grafana" / "dashboards" / "nwor_specpv.json"
    panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
    settings = {"$job": "nwor", "$__rate_interval": "10m"}
    found: dict[str, list[str]] = {}
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in settings.items():
                query = query.replace(name, value)
            found.setdefault(panel["title"], []).append(query)
    return found


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


def test_every_query_of_the_dashboard_has_an_answer(server: Server) -> None:
    seed = int(os.environ.get("NWOR_TEST_SEED") or secrets.randbits(32))
    print(f"seed={seed}")
    names = ("committed", "staged", "rejected")
    before = {name: Metrics().snapshot()[f"nwor_{name}_tokens_total"] for name in names}
    server.wait_for("nwor_staged_tokens_total", before["staged"])
    play(40, seed)
    after = {name: Metrics().snapshot()[f"nwor_{name}_tokens_total"] for name in names}
    server.wait_for("nwor_staged_tokens_total", after["staged"])
    found = dashboard_queries()
    queries = [query for panel in found.values() for query in panel]
    assert len(queries) > 20
    assert not any("$" in query for query in queries)
    for query in queries:
        assert server.wait_for_samples(query), query
    grown = {name: after[name] - before[name] for name in names}
    (acceptance,) = (query for query in queries if "committed" in query and "/ sum" in query and
                     "staged" in query)  # fmt: skip
    server.wait_for(acceptance, grown["committed"] / grown["staged"])
    assert server.query("sum by (reason) (nwor_no_such_total)") == []
    variable = f"http://127.0.0.1:{server.port}/api/v1/label/job/values?match[]=nwor_build_info"
    with urllib.request.urlopen(variable, timeout=10) as response:
        assert json.load(response)["data"] == ["nwor"]
