"""`nwor-specpv worker` as it is started: in a process of its own, stopped by a signal."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nwor_specpv import Metrics, NworError
from nwor_specpv.cli import main as cli
from nwor_specpv.models import stories
from nwor_specpv.worker import Client, WorkerError
from nwor_specpv.worker.address import is_loopback
from tests.python.worker.certificates import Authority
from tests.python.worker.serving import (
    LENGTH,
    PATIENCE_S,
    PLAIN,
    PROMPT,
    Calls,
    decode,
    serving,
)


@pytest.fixture(scope="module")
def story_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stories(progress=lambda *_: None, destination=tmp_path_factory.mktemp("m") / "stories")


def test_with_tls_and_a_token_it_may_listen_everywhere(story_folder: Path, tmp_path: Path) -> None:
    authority, token = Authority(tmp_path, "root"), tmp_path / "token"
    files = authority.issue()
    token.write_text("correct-horse\n")
    with started(
        *("--model", str(story_folder), "--host", "0.0.0.0", "--port", "0"),
        *("--cache-tokens", "2048", "--token-file", str(token)),
        *("--tls-certificate", str(files.certificate), "--tls-key", str(files.key)),
    ) as (process, line):
        found = re.match(r"worker: listening at 0\.0\.0\.0:(\d+), TLS, a token, model ", line)
        assert found, line + process.stderr.read()
        with Client(
            f"127.0.0.1:{found[1]}",
            timeout=PATIENCE_S,
            root_certificate=authority.root,
            token="correct-horse",
        ) as client:
            info = client.ping(wait=True)
            assert (info.samples, info.has_token_bytes) == (True, False)
            tokens = decode(client.session("a"), PROMPT, 10, 2)
            assert tokens == PLAIN[: len(tokens)]
            sampled = [
                client.session(f"s{run}").verify(None, PROMPT, temperature=1.0, seed=3).next_token
                for run in range(2)
            ]
            assert sampled[0] == sampled[1]
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (0, "")


def test_a_worker_that_hangs_is_found_without_a_timeout(story_folder: Path) -> None:
    with started("--model", str(story_folder), "--port", "0", "--cache-tokens", "2048") as (
        process,
        line,
    ):
        address = re.match(r"worker: listening at ([^,]+),", line)[1]
        with Client(address, keepalive_seconds=1) as client:
            session = client.session("a", resend=True)
            session.verify(None, PROMPT)
            process.send_signal(signal.SIGSTOP)  # its machine keeps the connection open
            with pytest.raises(WorkerError) as raised:
                session.verify(None, [PLAIN[len(PROMPT)]])
            assert raised.value.code == "UNAVAILABLE"
            process.send_signal(signal.SIGCONT)
            assert client.ping(wait=True).sessions == 1
            result = session.verify(None, [PLAIN[len(PROMPT)]])
            assert result.next_token == PLAIN[len(PROMPT) + 1]


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and what it said when it listened; killed if it does not end."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NWOR_SPECPV_")}
    with subprocess.Popen(
        [sys.executable, "-m", "nwor_specpv", "worker", "--threads", "1", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        watch = threading.Timer(PATIENCE_S, process.kill)
        watch.start()
        try:
            yield process, process.stdout.readline()
        finally:
            watch.cancel()
            process.kill()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_it_serves_until_it_is_told_to_stop(story_folder: Path, number: signal.Signals) -> None:
    metrics = ["--metrics-port", "0"] if Metrics().status()["built"] else []
    with started(
        "--model", str(story_folder), "--port", "0", "--cache-tokens", "2048", *metrics
    ) as (
        process,
        line,
    ):
        found = re.match(r"worker: listening at (127\.0\.0\.1:\d+), model (\S+), ", line)
        assert found, line + process.stderr.read()
        assert found[2] == str(story_folder)
        assert "at most 256 tree rows and 512 prompt tokens a call, 2048 cached tokens" in line
        assert "any number of sessions, idle ones end after 600 s" in line
        with Client(found[1], timeout=PATIENCE_S) as client:
            info = client.ping(wait=True)
            assert (info.model, info.vocab_size, info.max_length) == (str(story_folder), 512, 512)
            tokens = decode(client.session("a"), PROMPT, LENGTH, 3)
            assert tokens == PLAIN[: len(tokens)]
            if metrics:
                url = re.search(r"metrics at (\S+)$", line)[1]
                with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
                    assert "nwor_sessions_started_total 1" in response.read().decode()
            process.send_signal(number)
            out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out, err) == (0, "", "")


def test_sigterm_leaves_no_call_without_an_answer(story_folder: Path) -> None:
    """Clients that never pause get results, then UNAVAILABLE."""
    answered, gone = threading.Semaphore(0), threading.Event()

    def call_on(address: str, index: int) -> tuple[int, set[str]]:
        count, codes = 0, set()
        with Client(address, timeout=PATIENCE_S) as client:
            while not (gone.is_set() and codes):
                try:
                    client.session(f"s{index}").verify(None, PROMPT)
                    client.session(f"s{index}").end()
                except WorkerError as error:
                    codes.add(error.code)
                else:
                    count += 1
                    answered.release()
        return count, codes

    with started("--model", str(story_folder), "--port", "0", "--cache-tokens", "2048") as (
        process,
        line,
    ):
        address = re.match(r"worker: listening at ([^,]+),", line)[1]
        calls = Calls(*(lambda index=index: call_on(address, index) for index in range(4)))
        for _ in range(8):
            assert answered.acquire(timeout=PATIENCE_S)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=PATIENCE_S)
        gone.set()
        outcomes = calls.outcomes()
        assert (process.returncode, out, err) == (0, "", "")
    assert [codes for _, codes in outcomes] == [{"UNAVAILABLE"}] * 4


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["worker", *arguments])
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--port", "65536"), "--port: got 65536, expected 0 to 65535"),
        (("--port", "x"), "--port: got 'x', expected a whole number"),
        (("--ttl", "-1"), "--ttl: got '-1', expected seconds, 0 or more"),
        (("--ttl", "soon"), "--ttl: got 'soon', expected seconds, 0 or more"),
        (("--max-tree-rows", "0"), "--max-tree-rows: got 0, expected 1 or more"),
        (("--max-prompt-tokens", "0"), "--max-prompt-tokens: got 0, expected 1 or more"),
        (("--cache-tokens", "0"), "--cache-tokens: got 0, expected 1 or more"),
        (("--device", "tpu"), "--device: got 'tpu', expected cpu or cuda"),
        (
            ("--host", "no.such.host.invalid", "--insecure"),
            "cannot listen at no.such.host.invalid:50051",
        ),
        (("--host", "0.0.0.0"), "--host: got '0.0.0.0', which other machines can reach, without"),
        (("--tls-key", "/no/such"), "--tls-certificate: got none, expected a file"),
        (("--token-file", "/no/such"), "--token-file: got '/no/such', which cannot be read"),
        (
            ("--max-distribution-bytes", "-1"),
            "--max-distribution-bytes: got -1, expected 1 or more",
        ),
        (("--metrics-host", "here"), "metrics_host: got 'here'"),
        (
            ("--port", "0", "--max-prompt-tokens", "300000000", "--model", "/no/such/folder"),
            "max_distribution_bytes: got 256, 300000000 and",
        ),
        (("--port", "0", "--model", "/no/such/folder"), "model: got '/no/such/folder'"),
        (("--frobnicate",), "unrecognized arguments: --frobnicate"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("nwor-specpv: ")
    assert line in err
    assert err.count("\n") == 1


def test_a_busy_port_is_found_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as worker:
        port = str(worker.server.port)
        code, out, err = call(capsys, "--port", port, "--model", "/no/such/folder")
    assert (code, out) == (2, "")
    assert f"cannot listen at 127.0.0.1:{port}: Address already in use" in err


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("grpc", "grpcio"),
        ("google", "protobuf"),
        ("grpc_health", "grpcio-health-checking"),
        ("grpc_reflection", "grpcio-reflection"),
    ],
)
def test_without_its_packages_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    package: str,
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == module or name.startswith("nwor_specpv.worker"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    code, out, err = call(capsys)
    assert (code, out) == (1, "")
    assert err == (
        f"nwor-specpv: the target worker needs {package}, which is not installed: "
        'pip install "grpcio>=1.62" "grpcio-health-checking>=1.62" "grpcio-reflection>=1.62" '
        '"protobuf>=4.25"\n'
    )


def test_the_package_is_imported_without_grpc() -> None:
    code = (
        "import sys; sys.modules['grpc'] = None; import nwor_specpv.worker as worker\n"
        "try:\n    worker.Client\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("the target worker needs grpcio, which is not installed")


def test_what_is_not_there_is_an_attribute_error() -> None:
    from nwor_specpv import worker

    with pytest.raises(AttributeError, match="has no attribute 'Servant'"):
        worker.Servant  # noqa: B018
    assert issubclass(worker.WorkerError, NworError)


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("h.x", False)],
)
def test_what_only_this_machine_reaches(host: str, local: bool) -> None:
    assert is_loopback(host) == local
