"""What `status` tells: the build, the machine, this process, and a server that is asked."""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from nwor_specpv import (
    BYPASS_REASONS,
    Interceptor,
    Metrics,
    NworConfig,
    RoundPlan,
    _stamp,
)
from nwor_specpv.cli import (
    status,
)
from tests.python.cli.commands import call, run

EXPOSITION = """\
# TYPE nwor_fallback_total counter
nwor_fallback_total{rank="0",reason="disabled"} 0
nwor_fallback_total{rank="0",reason="capacity"} 3
nwor_fallback_total{rank="1",reason="capacity"} 4
nwor_fallback_total{reason="commit_lost",rank="1"} 1e+00
"""


@pytest.fixture
def served_text() -> Iterator[list[str]]:
    """A URL, and the text it answers with: [url, text]."""
    answer = ["", EXPOSITION]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer[1].encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        answer[0] = f"http://127.0.0.1:{server.server_port}/metrics"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield answer
        server.shutdown()
        thread.join()


def test_status_json_is_one_document_and_nothing_else() -> None:
    answer = run("status", "--json")
    assert answer.returncode == 0, answer.stderr
    report = json.loads(answer.stdout)
    stamp = _stamp.read_stamp()
    assert report["ok"] is True
    assert report["problem"] is None
    assert report["build"]["revision"] == stamp.revision
    assert report["build"]["architectures"] == list(stamp.architectures)
    assert report["torch"]["version"] == stamp.torch
    assert set(report["hosts"]) == {"vllm", "transformers"}
    assert report["metrics"] == {"built": True, "serving": False, "url": None, "problem": None}
    assert report["bypasses"] == []
    assert isinstance(report["devices"], list)
    assert "problem" in report["routes"]


def test_status_for_people_names_the_build_and_the_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = call(capsys, "status")
    stamp = _stamp.read_stamp()
    assert (code, err) == (0, "")
    for text in (stamp.revision, f"torch {stamp.torch}", "transformers", "metrics", "bypassed"):
        assert text in out


def test_status_shows_attention_routes_and_survives_their_absence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("nwor_specpv.ops.attention")
    monkeypatch.setitem(sys.modules, "nwor_specpv.ops.attention", module)
    assert "has no route_report()" in status.describe(status.collect())
    module.route_report = lambda: {"cpu": "taken"}
    assert "cpu: taken" in status.describe(status.collect())
    module.route_report = lambda: 1 // 0
    assert "route_report() failed: ZeroDivisionError" in status.describe(status.collect())
    monkeypatch.setitem(sys.modules, "nwor_specpv.ops.attention", None)
    assert "nwor_specpv.ops.attention cannot be imported" in status.describe(status.collect())


def test_status_shows_what_this_process_bypassed_and_where_it_serves() -> None:
    interceptor = Interceptor(NworConfig(enable_nwor=False))
    interceptor.begin(RoundPlan([2], [1]))
    interceptor.abort()
    port = Metrics().serve()
    try:
        report = status.collect()
    finally:
        Metrics().stop()
    assert report["metrics"]["url"] == f"http://127.0.0.1:{port}/metrics"
    assert report["metrics"]["serving"]
    (found,) = [b for b in report["bypasses"] if b["reason"] == "disabled"]
    assert found["count"] >= 1
    assert found["sentence"] == BYPASS_REASONS["disabled"]
    assert f"disabled: {BYPASS_REASONS['disabled']}" in status.describe(report)


def test_status_shows_a_busy_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupant:
        Metrics().serve(port=occupant.getsockname()[1])
    report = status.collect()
    assert "Address already in use" in report["metrics"]["problem"]
    assert "Address already in use" in status.describe(report)
    Metrics().stop()
    assert status.collect()["metrics"]["problem"] is None


def test_status_asks_a_running_server_for_its_counts(
    served_text: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "status", "--json", "--url", served_text[0])
    report = json.loads(out)
    assert code == 0
    assert report["metrics"]["serving"]
    assert report["metrics"]["url"] == served_text[0]
    assert [(b["reason"], b["count"], b["sentence"]) for b in report["bypasses"]] == [
        ("capacity", 7, BYPASS_REASONS["capacity"]),
        ("commit_lost", 1, BYPASS_REASONS["commit_lost"]),
    ]


def test_status_says_that_an_engine_is_not_lossless_before_its_first_step(
    served_text: list[str],
) -> None:
    served_text[1] += 'specpv_partial_steps_total 0\nspecpv_lossy_engines{rank="0"} 1\n'
    told = status.describe(status.collect(served_text[0]))
    assert "0, NOT lossless in 1 engines or generators" in told


def test_status_says_that_partial_steps_are_not_lossless(served_text: list[str]) -> None:
    assert "partial steps" not in status.describe(status.collect(served_text[0]))
    served_text[1] += (
        'specpv_partial_steps_total{rank="0"} 40\nspecpv_partial_steps_total{rank="1"} 2\n'
        'specpv_probed_rows_total{rank="0"} 20\nspecpv_deviating_rows_total{rank="0"} 3\n'
    )
    report = status.collect(served_text[0])
    assert report["partial_steps"]["partial_steps"] == 42
    assert report["partial_steps"]["deviating_rows"] == 3
    told = status.describe(report)
    assert "42, NOT lossless unless specpv_mode is lossless, 3 of 20 probed rows deviate" in told


def test_status_finds_the_server_by_its_settings(
    served_text: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NWOR_SPECPV_METRICS_PORT", served_text[0].split(":")[2].split("/")[0])
    monkeypatch.setenv("NWOR_SPECPV_METRICS_HOST", "0.0.0.0")
    assert status.collect()["metrics"]["url"] == served_text[0]
    assert [b["count"] for b in status.collect()["bypasses"]] == [7, 1]


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("localhost", "localhost"),
        ("192.0.2.1", "192.0.2.1"),
        ("::1", "[::1]"),
        ("2001:db8::7", "[2001:db8::7]"),
        ("0.0.0.0", "127.0.0.1"),
        ("::", "127.0.0.1"),
        ("::0", "127.0.0.1"),
        ("0:0:0:0:0:0:0:0", "127.0.0.1"),
        ("::ffff:0.0.0.0", "127.0.0.1"),
    ],
)
@pytest.mark.parametrize("configured", [True, False])
def test_status_names_an_address_that_can_be_opened(
    monkeypatch: pytest.MonkeyPatch, host: str, shown: str, configured: bool
) -> None:
    native, _ = status.load_native()
    if configured:
        monkeypatch.setenv("NWOR_SPECPV_METRICS_PORT", "9400")
        monkeypatch.setenv("NWOR_SPECPV_METRICS_HOST", host)
        monkeypatch.setattr(status, "_read", lambda _: EXPOSITION)
    else:
        serving = {"built": True, "serving": True, "host": host, "port": 9400}
        monkeypatch.setattr(native, "metrics_status", lambda: serving)
    assert status.collect()["metrics"]["url"] == f"http://{shown}:9400/metrics"


def test_status_says_when_the_server_does_not_answer(served_text: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/metrics"
    report = status.collect(url)
    assert f"{url} does not answer" in report["metrics"]["problem"]
    assert not report["metrics"]["serving"]
    assert report["bypasses"] is None
    assert report["partial_steps"] is None
    served_text[1] = "something_else 1\n"
    assert "no nwor_fallback_total" in status.collect(served_text[0])["metrics"]["problem"]
    for nowhere in ("nonsense", ""):
        assert "does not answer" in status.collect(nowhere)["metrics"]["problem"]


def test_status_says_when_a_port_speaks_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(4096)

        thread = threading.Thread(target=greet)
        thread.start()
        report = status.collect(f"http://127.0.0.1:{server.getsockname()[1]}/metrics")
        thread.join()
    assert "does not answer: " in report["metrics"]["problem"]
    assert "SSH-2.0" in report["metrics"]["problem"]
    assert report["bypasses"] is None


def test_asking_a_server_that_does_not_answer_is_a_failure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = call(capsys, "status", "--url", "nonsense")
    assert code == 1
    assert "nonsense does not answer" in out
    assert re.search(r"^bypassed +unknown: the endpoint does not answer$", out, re.MULTILINE)


def test_status_shows_wrong_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NWOR_SPECPV_METRICS_PROT", "9400")
    report = status.collect()
    assert "the nearest is 'NWOR_SPECPV_METRICS_PORT'" in report["metrics"]["problem"]
