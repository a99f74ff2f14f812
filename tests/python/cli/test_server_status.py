"""`nwor-specpv status --url`: the report is about the server and comes from its endpoint alone."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import nwor_specpv
from nwor_specpv import _C, Metrics, _stamp
from nwor_specpv.cli import server_status
from tests.python.cli.commands import call, run
from tests.python.metrics.rounds import play

BUILD = (
    'nwor_build_info{version="1.2.3",torch="2.11.0+cu130",cuda="13.0",architectures="90a 100",'
    'revision="0123456789ab"} 1\n'
)
BUSY = (
    BUILD
    + """\
# HELP nwor_fallback_total Fallbacks
# TYPE nwor_fallback_total counter
nwor_engine_info{rank="0",drafter="eagle3",draft_tokens="15",mode="lossless",attention="auto"} 1
nwor_rounds_total{rank="0"} 1000
nwor_rounds_total{rank="1"} 500
nwor_aborted_rounds_total{rank="0"} 2
nwor_staged_tokens_total{rank="0"} 6000
nwor_committed_tokens_total{rank="0"} 4500
nwor_rejected_tokens_total{rank="0"} 1500
nwor_failed_tokens_total{rank="0"} 30
nwor_commit_failures_total{rank="0",reason="slot_range"} 2
nwor_commit_failures_total{rank="0",reason="duplicate_slot"} 0
nwor_recoveries_total{rank="0"} 2
nwor_staging_off_engines{rank="0"} 1
nwor_cache_bytes_written_total{rank="0"} 3221225472
nwor_cache_bytes_avoided_total{rank="0"} 1.572864e+06
nwor_staging_bytes{rank="0"} 512
nwor_fallback_total{rank="0",reason="disabled"} 0
nwor_fallback_total{rank="0",reason="commit_lost"} 1e+00
nwor_fallback_total{rank="0",reason="capacity"} 3
nwor_fallback_total{reason="capacity",rank="1"} 4
specpv_partial_steps_total 40
specpv_full_steps_total{trigger="first"} 2
specpv_full_steps_total{trigger="interval"} 5
specpv_full_steps_total{trigger="policy"} 0
specpv_plain_steps_total 100
specpv_plain_step_tokens_total 900
specpv_plain_step_seconds_total 0.5
specpv_guess_steps_total 20
specpv_pass_steps_total 1380
specpv_pass_step_tokens_total 60000
specpv_pass_step_seconds_total 12
specpv_arm_switches_total 3
specpv_probe_steps_total 36
specpv_draft_passes_total 3750
specpv_drafted_tokens_total 8000
specpv_confirmed_tokens_total 6000
specpv_draft_failures_total{reason="out_of_memory"} 1
specpv_lossy_engines 1
specpv_probed_rows_total 20
specpv_deviating_rows_total 3
specpv_rechecked_tokens_total 400
specpv_disagreed_tokens_total 2
nwor_contract_violations_total 2
nwor_sessions_live 3
nwor_sessions_started_total 9
nwor_sessions_evicted_total 4
nwor_sessions_expired_total 2
nwor_worker_calls_total{outcome="answered"} 120
nwor_worker_calls_total{outcome="refused"} 3
nwor_worker_calls_total{outcome="failed"} 0
nwor_worker_bytes_received_total 2048
nwor_worker_bytes_sent_total 1024
vllm:num_requests_running{model_name="a b"} 1.0
"""
)
BUSY_LINES = """\
version         1.2.3 (0123456789ab), torch 2.11.0+cu130, CUDA 13.0
engine          drafter eagle3, up to 15 draft tokens, mode lossless, attention auto
rounds          1,500 (2 aborted)
acceptance      75.0% (4,500 of 6,000 draft tokens)
draft tokens    6,000 staged, 4,500 committed, 1,500 rejected
cache writes    3.0 GiB written, 1.5 MiB avoided
staging         512 B
bypassed        capacity 7, commit_lost 1 (docs/metrics.md explains the reasons)
failed commits  slot_range 2; 30 draft tokens, requests computed again 2 times
drafts          OFF after a fault; the log says which and for how long
steps           40 partial, 7 full (interval 5, first 2)
chosen steps    100 plain (1,800 tokens/s), 20 guess, 1,380 pass (5,000 tokens/s)
choices         3 switches, 36 probe steps
draft passes    3,750, 2.50 per round
confirmed       75.0% (6,000 of 8,000 tokens drafted over views)
draft failures  out_of_memory 1
lossless        NO: tokens may differ from those of full attention
drift           15.0% (3 of 20 probed rows)
drift           0.5% (2 of 400 rechecked tokens)
contract        BROKEN 2 times
sessions        3 live, 9 started, 4 evicted, 2 expired
calls           answered 120, refused 3; 2.0 KiB received, 1.0 KiB sent
"""
IDLE_LINES = """\
version       1.2.3 (0123456789ab), torch 2.11.0+cu130, CUDA 13.0
engine        not described
rounds        0
acceptance    no draft tokens yet
draft tokens  0 staged, 0 committed, 0 rejected
cache writes  0 B written, 0 B avoided
staging       0 B
bypassed      nothing
"""


@pytest.fixture
def served() -> Iterator[list[str]]:
    """An endpoint and the text it answers with: [url, text]."""
    answer = ["", BUSY]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
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


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_a_busy_server_is_shown_in_aligned_lines(
    served: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "status", "--url", served[0])
    assert (code, err) == (0, "")
    assert out == f"server          {served[0]}\n{BUSY_LINES}"


def test_an_idle_server_has_no_lines_about_what_it_does_not_use(
    served: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    served[1] = BUILD
    code, out, _ = call(capsys, "status", "--url", served[0])
    assert (code, out) == (0, f"server        {served[0]}\n{IDLE_LINES}")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(59, "0 h 0 min"), (3600 * 5 + 60 * 7, "5 h 7 min"), (90000, "1 d 1 h")]
)
def test_the_uptime_is_shown(served: list[str], seconds: int, shown: str) -> None:
    served[1] += f"process_start_time_seconds {time.time() - seconds - 0.5}\n"
    assert server_status.lines(server_status.collect(served[0]))[0][1].endswith(f", up {shown}")


def test_json_is_one_document_about_the_server(
    served: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "status", "--json", "--url", served[0])
    report = json.loads(out)
    assert code == 0
    assert set(report) == {"ok", "problem", "server"}
    assert (report["ok"], report["problem"]) == (True, None)
    server = report["server"]
    assert server["url"] == served[0]
    assert server["build"] == {
        "version": "1.2.3",
        "revision": "0123456789ab",
        "torch": "2.11.0+cu130",
        "cuda": "13.0",
        "architectures": "90a 100",
    }
    assert server["engine"] == {
        "drafter": "eagle3",
        "draft_tokens": "15",
        "mode": "lossless",
        "attention": "auto",
    }
    assert server["acceptance"] == 0.75
    assert server["draft_passes_per_round"] == 2.5
    assert server["rounds"] == 1500
    assert server["bypasses"] == {"commit_lost": 1, "capacity": 7}
    assert server["full_steps"] == {"first": 2, "interval": 5}


def test_local_adds_this_machine(served: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "status", "--url", served[0], "--local")
    assert code == 0
    assert re.search(rf"^torch +{re.escape(_stamp.read_stamp().torch)}", out, re.M)
    assert re.search(r"^version +1\.2\.3", out, re.M)
    _, out, _ = call(capsys, "status", "--url", served[0], "--local", "--json")
    report = json.loads(out)
    assert report["build"]["revision"] == _stamp.read_stamp().revision
    assert report["server"]["build"]["revision"] == "0123456789ab"


def test_the_settings_in_the_environment_name_a_server(
    served: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NWOR_SPECPV_METRICS_PORT", served[0].split(":")[2].split("/")[0])
    monkeypatch.setenv("NWOR_SPECPV_METRICS_HOST", "0.0.0.0")
    code, out, _ = call(capsys, "status")
    assert code == 0
    assert re.search(rf"^metrics +{re.escape(served[0])}$", out, re.M)
    assert re.search(r"^acceptance +75\.0%", out, re.M)


def test_a_configured_server_that_is_down_is_no_failure(
    closed_port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NWOR_SPECPV_METRICS_PORT", str(closed_port))
    code, out, _ = call(capsys, "status")
    assert code == 0
    assert re.search(r"^server +http://.* does not answer: Connection refused$", out, re.M)


@pytest.mark.parametrize("path", ["", "/", "/metrics"])
@pytest.mark.parametrize("scheme", ["", "http://"])
def test_scheme_and_path_may_be_left_out(served: list[str], scheme: str, path: str) -> None:
    place = served[0].removeprefix("http://").removesuffix("/metrics")
    report = server_status.collect(f"{scheme}{place}{path}")
    assert (report["url"], report["problem"]) == (served[0], None)


def test_an_unreachable_server_is_one_line_and_exit_1(
    closed_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{closed_port}/metrics"
    problem = f"{url} does not answer: Connection refused"
    code, out, err = call(capsys, "status", "--url", url)
    assert (code, out, err) == (1, f"server  {problem}\n", "")
    code, out, err = call(capsys, "status", "--url", url, "--json")
    assert (code, err) == (1, "")
    server = {"url": url, "problem": problem}
    assert json.loads(out) == {"ok": False, "problem": problem, "server": server}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://nonsense.invalid/metrics", "does not answer: "),
        ("file:///etc/hostname", "does not answer: the address is neither http nor https"),
        ("http://[::1/metrics", "does not answer: "),
        ("http://127.0.0.1:99999/metrics", "does not answer: "),
    ],
)
def test_an_address_that_is_none_is_one_line_and_exit_1(
    capsys: pytest.CaptureFixture[str], url: str, problem: str
) -> None:
    code, out, err = call(capsys, "status", "--url", url)
    assert (code, err, out.count("\n")) == (1, "", 1)
    assert f"{url} {problem}" in out


def test_a_foreign_endpoint_is_one_line_and_exit_1(
    served: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    served[1] = 'vllm:num_requests_running{model_name="a"} 1.0\nnot a sample\n'
    code, out, err = call(capsys, "status", "--url", served[0])
    sentence = "is not an endpoint of nwor_specpv: it has no series nwor_build_info"
    assert (code, out, err) == (1, f"server  {served[0]} {sentence}\n", "")
    code, out, _ = call(capsys, "status", "--url", served[0].replace("metrics", "elsewhere"))
    assert (code, out.count("\n")) == (1, 1)
    assert "does not answer: HTTP Error 404: Not Found" in out


def test_a_port_that_speaks_another_protocol_is_one_line_and_exit_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(4096)

        thread = threading.Thread(target=greet)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/metrics"
        code, out, err = call(capsys, "status", "--url", url)
        thread.join()
    assert (code, out, err) == (1, f"server  {url} does not answer: SSH-2.0-OpenSSH_9.2\n", "")


def test_the_report_agrees_with_what_an_endpoint_counted() -> None:
    metrics = Metrics()
    _C.describe_engine("ngram", 4, "full", "auto")
    before = metrics.snapshot()
    play(20, 7)
    port = metrics.serve()
    try:
        report = server_status.collect(f"127.0.0.1:{port}")
    finally:
        metrics.stop()
    after = metrics.snapshot()
    assert report["problem"] is None
    assert report["staged_tokens"] == after["nwor_staged_tokens_total"]
    assert after["nwor_staged_tokens_total"] > before["nwor_staged_tokens_total"]
    assert report["build"]["revision"] == _stamp.read_stamp().revision
    assert report["engine"]["drafter"] == "ngram"
    assert report["uptime_seconds"] >= 0


def test_every_series_named_exists() -> None:
    text = Metrics().render()
    series = [*server_status._COUNTS.values(), "nwor_build_info", "nwor_engine_info"]
    series += [name for name, _ in server_status._COUNTS_BY_LABEL.values()]
    assert [name for name in series if f"# TYPE {name} " not in text] == []


def test_asking_a_server_needs_no_torch(served: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')\n")
    package = Path(nwor_specpv.__file__).resolve().parents[1]
    path = os.pathsep.join(map(str, (tmp_path, package)))
    for arguments in (("--url", served[0]), (f"--url={served[0]}",)):
        answer = run("status", *arguments, PYTHONPATH=path)
        assert (answer.returncode, answer.stderr) == (0, "")
        assert answer.stdout.endswith(BUSY_LINES)


def test_the_module_imports_the_standard_library_only(served: list[str]) -> None:
    script = (
        "import runpy, sys; module = runpy.run_path(sys.argv[1]); "
        "print(module['collect'](sys.argv[2])['rounds'], 'torch' in sys.modules)"
    )
    command = [sys.executable, "-I", "-c", script, server_status.__file__, served[0]]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (answer.stdout, answer.stderr) == ("1500 False\n", "")
