"""The endpoint: off by default, on loopback, never fatal, at home in forked and spawned workers."""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import logging
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nwor_specpv import Metrics, NworError
from nwor_specpv.config import Settings
from nwor_specpv.metrics import worker_port

# Counts one round in the parent, serves, and lets a worker of each kind do the same for itself.
WORKERS = """
import json
import multiprocessing
import sys
import urllib.request

from nwor_specpv import Interceptor, Metrics, NworConfig, RoundPlan


def count_rounds(number):
    interceptor = Interceptor(NworConfig(enable_nwor=False))
    for _ in range(number):
        interceptor.begin(RoundPlan([1], [0]))
        interceptor.abort()


def rounds_at(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("nwor_rounds_total"))


def work(pipe, parents_port):
    metrics = Metrics()
    report = {"serving_at_start": metrics.status()["serving"]}
    report["parents_port"] = metrics.serve(port=parents_port)
    report["port"] = metrics.serve()
    count_rounds(5)
    report["rounds"] = rounds_at(report["port"])
    metrics.stop()
    report["serving_at_end"] = metrics.status()["serving"]
    pipe.send(report)


if __name__ == "__main__":
    metrics = Metrics()
    count_rounds(2)
    port = metrics.serve()
    context = multiprocessing.get_context(sys.argv[1])
    here, there = context.Pipe()
    worker = context.Process(target=work, args=(there, port))
    worker.start()
    report = here.recv() if here.poll(100) else {"problem": "no answer"}
    worker.join(60)
    report["exitcode"] = worker.exitcode
    report["parent_serving"] = metrics.status()["serving"]
    report["parent_rounds"] = rounds_at(port)
    report["same_port"] = report.get("port") == port
    print(json.dumps(report))
"""


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    found = Metrics()
    assert found.status()["built"], "the tests need a build with prometheus-cpp"
    yield found
    found.stop()


def run_script(
    folder: Path, text: str, *arguments: str, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=timeout
    )


def answers(address: str, port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}:{port}/metrics", timeout=20) as response:
            return b"nwor_rounds_total" in response.read()
    except urllib.error.URLError:
        return False


def ask(port: int, method: str, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def test_health_checks_are_answered(metrics: Metrics) -> None:
    port = metrics.serve()
    answer = ask(port, "GET", "/healthz")
    assert (answer.status, answer.read()) == (200, b"ok\n")
    answer = ask(port, "HEAD", "/healthz")
    assert (answer.status, answer.read()) == (200, b"")


def test_other_requests_are_refused(metrics: Metrics) -> None:
    port = metrics.serve()
    assert ask(port, "GET", "/").status == 404
    answer = ask(port, "POST", "/metrics")
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert ask(port, "GET", "/metrics", Cookie="a" * 20000).status == 431


def test_silent_connections_do_not_hold_up_a_scrape(metrics: Metrics) -> None:
    """64 of them, each replaced by a new one as soon as it is the oldest."""
    port = metrics.serve()
    done = threading.Event()
    ready = threading.Event()

    def renew() -> None:
        with contextlib.ExitStack() as stack:
            silent: collections.deque[socket.socket] = collections.deque()
            stack.callback(lambda: [connection.close() for connection in silent])
            while not done.is_set():
                silent.append(socket.create_connection(("127.0.0.1", port), timeout=20))
                if len(silent) > 64:
                    silent.popleft().close()
                    ready.set()
                    time.sleep(0.0005)

    renewer = threading.Thread(target=renew)
    renewer.start()
    assert ready.wait(60)
    durations = []
    for _ in range(20):
        start = time.monotonic()
        assert answers("127.0.0.1", port)
        durations.append(time.monotonic() - start)
    done.set()
    renewer.join()
    assert max(durations) < 1


def test_parallel_scrapes_are_all_answered(metrics: Metrics) -> None:
    port = metrics.serve()
    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(lambda _: answers("127.0.0.1", port), range(128)))


def test_nothing_listens_until_asked(tmp_path: Path) -> None:
    script = """
import json, os, nwor_specpv
before = nwor_specpv.Metrics().status()
threads = len(os.listdir("/proc/self/task"))
port = nwor_specpv.Metrics().serve()
print(json.dumps([before["serving"], port > 0, len(os.listdir("/proc/self/task")) > threads]))
"""
    answer = run_script(tmp_path, script)
    assert json.loads(answer.stdout) == [False, True, True], answer.stderr


def test_serving_is_idempotent_and_ends_with_stop(metrics: Metrics) -> None:
    port = metrics.serve()
    assert port > 0
    assert metrics.serve() == port
    assert metrics.serve("127.0.0.1", port) == port
    assert answers("127.0.0.1", port)
    assert metrics.status() == {
        "built": True,
        "serving": True,
        "host": "127.0.0.1",
        "port": port,
        "problem": "",
    }
    metrics.stop()
    metrics.stop()
    assert not answers("127.0.0.1", port)
    assert metrics.serve("127.0.0.1", port) == port


def test_loopback_is_not_reachable_from_other_addresses(metrics: Metrics) -> None:
    port = metrics.serve()
    assert answers("127.0.0.1", port)
    assert not answers("127.0.0.2", port)


def test_a_busy_port_is_logged_and_shown_and_never_fatal(
    metrics: Metrics, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupant:
        port = occupant.getsockname()[1]
        with caplog.at_level(logging.WARNING, logger="nwor_specpv"):
            assert metrics.serve(port=port) == -1
    sentence = f"cannot serve metrics at 127.0.0.1:{port}: Address already in use"
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("nwor_specpv", "WARNING", sentence)
    ]
    status = metrics.status()
    assert (status["serving"], status["problem"]) == (False, sentence)
    assert capfd.readouterr() == ("", "")
    assert metrics.serve(port=port) == port
    assert metrics.status()["problem"] == ""


def test_the_endpoint_moves_to_another_host_at_its_own_port(metrics: Metrics) -> None:
    port = metrics.serve()
    for host in ("0.0.0.0", "127.0.0.2", "127.0.0.1"):
        assert metrics.serve(host, port) == port
        assert metrics.status() == {
            "built": True,
            "serving": True,
            "host": host,
            "port": port,
            "problem": "",
        }
        assert answers("127.0.0.1", port) == (host != "127.0.0.2")
        assert answers("127.0.0.2", port) == (host != "127.0.0.1")


def test_the_endpoint_stays_when_its_port_cannot_be_had_elsewhere(metrics: Metrics) -> None:
    port = metrics.serve()
    assert metrics.serve("192.0.2.1", port) == -1  # an address of documentation, nobody's
    status = metrics.status()
    assert (status["serving"], status["host"], status["port"]) == (True, "127.0.0.1", port)
    assert status["problem"].startswith(f"cannot serve metrics at 192.0.2.1:{port}: ")
    assert answers("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "localhost"),
        ("::1", "[::1]"),
        ("0.0.0.0", "127.0.0.1"),
    ],
)
def test_the_address_in_the_log_is_one_that_can_be_opened(
    metrics: Metrics, caplog: pytest.LogCaptureFixture, host: str, shown: str
) -> None:
    with caplog.at_level(logging.INFO, logger="nwor_specpv"):
        port = metrics.serve(host)
    if port < 0:
        pytest.skip(f"this machine cannot listen at {host}: {metrics.status()['problem']}")
    (record,) = caplog.records
    assert record.getMessage() == f"metrics at http://{shown}:{port}/metrics"
    assert answers(shown, port)


def test_a_status_that_waits_keeps_nobody_from_running(tmp_path: Path) -> None:
    """A fork holds the lock of the endpoint while a handler of another wants the interpreter."""
    script = """
import ctypes, threading, time

libc, held = ctypes.CDLL(None), threading.Event()


@ctypes.CFUNCTYPE(None)
def prepare():
    held.set()
    time.sleep(0.5)


libc.__register_atfork(prepare, None, libc._exit, None)  # before the endpoint's: called after them
import nwor_specpv

metrics = nwor_specpv.Metrics()
metrics.status()
forking = threading.Thread(target=libc.fork)
forking.start()
held.wait()
print(metrics.status()["serving"])
forking.join()
"""
    answer = run_script(tmp_path, script, timeout=120)
    assert (answer.stdout, answer.stderr) == ("False\n", "")


@pytest.mark.parametrize("host", ["", "example", "127.0.0.1:80", "1.2.3", "127.0.0.1,9400"])
def test_a_bad_host_is_refused(metrics: Metrics, host: str) -> None:
    with pytest.raises(NworError, match=f"^host: got '{host}', expected an IP address or local"):
        metrics.serve(host)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_bad_port_is_refused(metrics: Metrics, port: int) -> None:
    with pytest.raises(NworError, match=rf"^port: got {port}, expected 0 \(any\) to 65535$"):
        metrics.serve(port=port)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_count_and_serve_for_themselves(tmp_path: Path, method: str) -> None:
    answer = run_script(tmp_path, WORKERS, method)
    assert answer.stdout, answer.stderr
    report = json.loads(answer.stdout)
    assert report.pop("port") > 0
    assert report == {
        "serving_at_start": False,
        "parents_port": -1,
        "rounds": 5.0,
        "serving_at_end": False,
        "exitcode": 0,
        "parent_serving": True,
        "parent_rounds": 2.0,
        "same_port": False,
    }


def test_a_killed_parent_leaves_no_port_to_its_forked_child(tmp_path: Path) -> None:
    # By its inode: the port itself may be another process's a moment later.
    script = """
import os, time, nwor_specpv

def listening():
    rows = [line.split() for line in open("/proc/net/tcp")][1:]
    return {row[9]: int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A"}

port = nwor_specpv.Metrics().serve()
(inode,) = (inode for inode, at in listening().items() if at == port)
ready, gate = os.pipe()
child = os.fork()
if child == 0:
    os.close(gate)
    os.read(ready, 1)  # returns when the parent is gone
    # The kernel closes the parent's pipe and its socket in no promised order.
    for _ in range(100):
        if inode not in listening():
            break
        time.sleep(0.1)
    print("still there" if inode in listening() else "free", flush=True)
os._exit(0)
"""
    assert run_script(tmp_path, script).stdout.strip() == "free"


def test_a_process_that_serves_ends_at_once_and_quietly(tmp_path: Path) -> None:
    script = "import nwor_specpv; print(nwor_specpv.Metrics().serve() > 0)"
    answer = run_script(tmp_path, script)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, "True\n", "")


def test_workers_of_a_machine_get_ports_of_their_own(metrics: Metrics) -> None:
    assert worker_port(9400, {}) == 9400
    assert worker_port(9400, {"LOCAL_RANK": "3"}) == 9403
    assert worker_port(9400, {"LOCAL_RANK": "first"}) == 9400
    assert worker_port(0, {"LOCAL_RANK": "3"}) == 0
    assert metrics.serve_settings(Settings()) is None
    assert not metrics.status()["serving"]
    port = metrics.serve_settings(Settings(metrics_port=0), {"LOCAL_RANK": "3"})
    assert port == metrics.status()["port"] > 0


def test_a_port_that_is_no_port_names_the_setting_and_the_rank(metrics: Metrics) -> None:
    assert worker_port(65535, {"LOCAL_RANK": "0"}) == 65535
    sentence = (
        r"^metrics_port: got 65534, which is port 65536 for local rank 2, expected at most 65533$"
    )
    with pytest.raises(NworError, match=sentence):
        metrics.serve_settings(Settings(metrics_port=65534), {"LOCAL_RANK": "2"})
    assert not metrics.status()["serving"]


def test_series_carry_the_rank_a_launcher_set(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "\nnwor_rounds_total " in metrics.render()
    monkeypatch.setenv("RANK", "6")
    text = metrics.render()
    assert '\nnwor_rounds_total{rank="6"} ' in text
    assert '\nnwor_fallback_total{rank="6",reason="capacity"} ' in text
