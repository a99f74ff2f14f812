"""The command line: exit codes, one line for wrong use, one JSON document for --json."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch

import nwor_specpv
from nwor_specpv import (
    BYPASS_REASONS,
    Interceptor,
    Metrics,
    NworConfig,
    NworError,
    RoundPlan,
    _stamp,
    doctor,
    status,
)
from nwor_specpv import __main__ as cli
from nwor_specpv.bench import report as bench_report
from nwor_specpv.bench import session as bench_session

PACKAGE = Path(nwor_specpv.__file__).resolve().parent

EXPOSITION = """\
# TYPE nwor_fallback_total counter
nwor_fallback_total{rank="0",reason="disabled"} 0
nwor_fallback_total{rank="0",reason="capacity"} 3
nwor_fallback_total{rank="1",reason="capacity"} 4
nwor_fallback_total{reason="commit_lost",rank="1"} 1e+00
"""


def run(*arguments: str, pythonpath: Path | None = None, **env: str) -> subprocess.CompletedProcess:
    """`python -m nwor_specpv` in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NWOR_SPECPV_")} | env
    if pythonpath is not None:
        environment["PYTHONPATH"] = str(pythonpath)
    return subprocess.run(
        [sys.executable, "-m", "nwor_specpv", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The same in this process."""
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    return code, out, err


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


@pytest.fixture
def broken_package(tmp_path: Path) -> Path:
    """A copy of the package whose stamp names another torch; the folder to put on the path."""
    copy = tmp_path / "nwor_specpv"
    copy.mkdir()
    for file in PACKAGE.iterdir():
        if file.suffix in (".py", ".so"):
            shutil.copy(file, copy)
    stamp = json.loads((PACKAGE / _stamp.STAMP).read_text())
    (copy / _stamp.STAMP).write_text(json.dumps(stamp | {"torch": "1.0.0"}))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "a command is needed: status, doctor, bench, generate, report, demo, worker"),
        (("frobnicate",), "argument command: invalid choice: 'frobnicate'"),
        (("status", "--frobnicate"), "unrecognized arguments: --frobnicate"),
        (("status", "more"), "unrecognized arguments: more"),
        (("doctor", "--json", "more"), "unrecognized arguments: more"),
        (("bench",), "the following arguments are required"),
        (("bench", "frobnicate"), "invalid choice: 'frobnicate'"),
        (("status", "--url"), "argument --url: expected one argument"),
        (("status", "--url", ""), "argument --url: got '', expected the address of an endpoint"),
        (("status", "--url", " "), "argument --url: got ' ', expected the address of an endpoint"),
        (("bench", "commit", "--frobnicate"), "unrecognized arguments: --frobnicate"),
        (("bench", "commit", "--replays", "x"), "--replays: got 'x', expected a whole number"),
        (("bench", "attention", "--rows", "4,0"), "--rows: got 0, expected 1 or more"),
        (("bench", "attention", "--heads", "9/2"), "--heads: got '9/2', expected query and KV"),
        (("bench", "retrieval", "--heads", "8"), "--heads: got '8', expected query and KV heads"),
        (("bench", "tree", "--threads", "-1"), "--threads: got -1, expected 1 or more"),
        (("bench", "tree", "--rows", "1"), "--rows: got 1, expected 2 .. 64"),
        (("bench", "tree", "--vocabulary", "4"), "--vocabulary: got 4, expected at least --best 8"),
        (("bench", "retrieval", "--tokens", "100"), "--tokens: got 100, expected 176 or more"),
        (("bench", "retrieval", "--steps", "100"), "--steps: got 100, expected 176 or more"),
        (
            ("bench", "retrieval", "--tokens", "512,200"),
            "--tokens: got 200, expected a multiple of",
        ),
        (("bench", "retrieval", "--steps", "1000"), "--steps: got 1000, expected a multiple of 16"),
        (("bench", "attention", "--mask"), "--mask: expected at least one argument"),
        (("bench", "coverage", "--text", "/no/text"), "--text: got '/no/text', which cannot be re"),
        (("bench", "coverage", "--budgets", "8000"), "--budgets: got [8000], expected less than"),
        (("bench", "coverage", "--tokens", "352"), "--tokens: got 352, expected 502 or more"),
        (("bench", "generate", "--tokens", "1"), "--tokens: got 1, expected 2 or more"),
        (("bench", "generate", "--view-tokens", "9"), "--view-tokens: got 9, expected 176 or more"),
        (("bench", "generate", "--context", "-1"), "--context: got -1, expected 1 or more"),
        (("bench", "session", "--json", "/no/such/folder/x"), "a file in a folder that exists"),
        (("demo", "--context", "0"), "--context: got 0, expected 1 or more"),
        (("report", "--max-new-tokens", "0"), "--max-new-tokens: got 0, expected 1 or more"),
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
    assert err.endswith("\n")


def test_help_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "--help")
    assert (code, err) == (0, "")
    for command in ("status", "doctor", "bench", "generate", "report", "demo", "worker"):
        assert command in out


def test_version_is_that_of_the_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "--version") == (0, f"nwor-specpv {nwor_specpv.__version__}\n", "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_benchmark_without_its_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "bench", "tree", "--device", "cuda")
    assert (code, out) == (2, "")
    assert err == "nwor-specpv: --device: got cuda, but torch finds no GPU here; use --device cpu\n"


def test_a_benchmark_gives_its_figures_as_one_document(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = ("bench", "session", "--short", "4", "--long", "8", "--replays", "1", "--json")
    code, out, err = call(capsys, *small)
    assert (code, err) == (0, "")
    assert set(json.loads(out)["results"])
    code, out, err = call(capsys, *small, str(tmp_path / "figures.json"))
    assert (code, err) == (0, "")
    assert "torch" in out
    assert json.loads((tmp_path / "figures.json").read_text())["lengths"] == [4, 8]


def test_figures_that_cannot_be_written_are_found_out_before_the_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_session, "measure", lambda *_, **__: pytest.fail("began the work"))
    link, place = tmp_path / "link", tmp_path / "figures.json"
    link.symlink_to(tmp_path / "absent" / "figures.json")
    for path in (tmp_path, tmp_path / "absent" / "figures.json", link):
        code, out, err = call(capsys, "bench", "session", "--json", str(path))
        assert (code, out) == (2, "")
        assert f"--json: got '{path}', expected a file in a folder that exists" in err
    place.write_text("before")
    # Everything is open to root.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    code, out, err = call(capsys, "bench", "session", "--json", str(place))
    assert (code, out) == (2, "")
    assert f"--json: got '{place}', expected a file in a folder to write to" in err
    assert place.read_text() == "before"


def test_figures_for_which_there_is_no_room_leave_older_ones_whole(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = tmp_path / "figures.json"
    place.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(NworError, match=f"^--json: got '{place}', which cannot be written: "):
            bench_report.publish({"figure": "1" * 100}, lambda report: "a table", place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().out == "a table\n"
    assert place.read_text() == "before"
    assert list(tmp_path.iterdir()) == [place]


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
    module = types.ModuleType("nwor_specpv.attention")
    monkeypatch.setitem(sys.modules, "nwor_specpv.attention", module)
    assert "offers no route_report()" in status.describe(status.collect())
    module.route_report = lambda: {"cpu": "taken"}
    assert "cpu: taken" in status.describe(status.collect())
    module.route_report = lambda: 1 // 0
    assert "route_report() failed: ZeroDivisionError" in status.describe(status.collect())
    monkeypatch.setitem(sys.modules, "nwor_specpv.attention", None)
    assert "nwor_specpv.attention is absent" in status.describe(status.collect())


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
    assert "0, NOT lossless: 1 engines or generators are not" in told


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
    assert "42, NOT lossless unless specpv_rectify is lossless, 3 of 20 probed rows deviate" in told


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


def test_doctor_json_is_one_document_and_the_core_works() -> None:
    answer = run("doctor", "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    report = json.loads(answer.stdout)
    assert report["ok"] is True
    findings = {finding["name"]: finding for finding in report["findings"]}
    core = {name for name, finding in findings.items() if finding["needed_for"] == "core"}
    assert core == {"torch", "native library", "round trip"}
    for name in ("compiler", "cmake", "ninja", "nvcc", "prometheus-cpp", "gtest", "GPU", "vllm"):
        assert findings[name]["mend"]
    assert findings["compiler"]["ok"]
    assert all(finding["detail"] for finding in findings.values())


def test_doctor_for_people_has_a_line_each_and_a_mend_for_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    code, out, err = call(capsys, "doctor")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[-1] == "the core works"
    assert all(line.startswith(("ok  ", "missing  ")) for line in lines[:-1])
    (compiler,) = [line for line in lines if line.split()[1] == "compiler"]
    assert compiler.startswith("missing")
    assert "apt-get install g++" in compiler


def test_doctor_tells_a_wrong_torch_and_a_failed_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no round today")

    monkeypatch.setattr(doctor, "_wanted_torch", lambda: "1.0.0")
    monkeypatch.setattr(nwor_specpv, "Interceptor", fail)
    findings = doctor.examine()
    bad = {finding.name: finding.detail for finding in findings if not finding.ok}
    assert bad["torch"].endswith("but built for 1.0.0")
    assert bad["round trip"] == "RuntimeError: no round today"
    assert not doctor.core_works(findings)
    assert doctor.describe(findings).endswith("the core does not work")


@pytest.mark.parametrize(
    ("capability", "mend"),
    [
        ((9, 0), "TORCH_CUDA_ARCH_LIST=9.0a make build"),
        ((10, 0), "TORCH_CUDA_ARCH_LIST=10.0 make build"),
        ((7, 5), "everything works on the CPU"),
    ],
)
def test_doctor_says_what_to_build_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], mend: str
) -> None:
    built = _stamp.BuildStamp("0.1.0", "2.11.0", "", (), "0123456789ab")
    monkeypatch.setattr(_stamp, "read_stamp", lambda *_: built)
    answers = {"is_available": True, "current_device": 0, "get_device_name": "Some GPU"}
    for name, answer in (answers | {"get_device_capability": capability}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    finding = doctor._gpu()
    assert not finding.ok
    assert finding.mend.startswith(mend)


def test_status_and_doctor_work_without_the_library(broken_package: Path) -> None:
    sentence = f"built for torch 1.0.0, but torch {_stamp.read_stamp().torch} is installed"
    answer = run("status", "--json", pythonpath=broken_package)
    report = json.loads(answer.stdout)
    assert (answer.returncode, answer.stderr) == (1, "")
    assert report["ok"] is False
    assert sentence in report["problem"]
    assert report["build"]["torch"] == "1.0.0"
    assert sentence in status.describe(report)
    answer = run("doctor", "--json", pythonpath=broken_package)
    assert (answer.returncode, json.loads(answer.stdout)["ok"]) == (1, False)


@pytest.mark.parametrize(
    "raised",
    [
        'OSError("libcudart.so.13: cannot open shared object file")',
        'ValueError("libcublas.so.*[0-9] not found")',
        "ModuleNotFoundError(\"No module named 'numbers2'\", name='numbers2')",
    ],
)
def test_a_torch_that_is_broken_is_told(tmp_path: Path, raised: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {raised}\n")
    path = os.pathsep.join(map(str, (tmp_path, PACKAGE.parent)))
    text = raised.split("(")[1][1:10]
    answer = run("status", "--json", PYTHONPATH=path)
    assert (answer.returncode, answer.stderr) == (1, "")
    report = json.loads(answer.stdout)
    assert text in report["problem"]
    assert "pip install" in report["problem"]
    assert text in report["torch"]["problem"]
    assert text in re.search(r"^torch +(.*)$", status.describe(report), re.MULTILINE)[1]
    answer = run("doctor", "--json", PYTHONPATH=path)
    assert (answer.returncode, answer.stderr) == (1, "")
    findings = {finding["name"]: finding for finding in json.loads(answer.stdout)["findings"]}
    assert not findings["torch"]["ok"]
    assert text in findings["torch"]["detail"]
    assert text in findings["GPU"]["detail"]


def test_a_folder_of_a_packages_name_is_no_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nwor_no_such_host").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert status.installed_version("nwor_no_such_host") is None
    (tmp_path / "nwor_no_such_host" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert status.installed_version("nwor_no_such_host") == "unknown version"


def test_doctor_names_a_torch_that_pip_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_wanted_torch", lambda: "2.11.0+cu130")
    monkeypatch.setattr(status, "installed_version", lambda *_, **__: None)
    (torch_finding,) = [finding for finding in doctor.examine() if finding.name == "torch"]
    assert torch_finding.mend == "pip install torch==2.11.0"


def test_importing_or_using_a_broken_package_is_one_sentence(broken_package: Path) -> None:
    answer = run("demo", pythonpath=broken_package)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert answer.stderr.count("\n") == 1
    assert "built for torch 1.0.0" in answer.stderr
    environment = os.environ | {"PYTHONPATH": str(broken_package)}
    answer = subprocess.run(
        [sys.executable, "-c", "import nwor_specpv"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert answer.returncode == 1
    last = answer.stderr.splitlines()[-1]
    assert last.startswith("nwor_specpv._stamp.StampMismatch: nwor_specpv ")
    assert "built for torch 1.0.0" in last


def test_bench_and_demo_get_the_rest_of_the_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str]]] = []

    def dispatch(name: str, argv: list[str]) -> int:
        seen.append((name, argv))
        return 0

    monkeypatch.setattr(cli, "_dispatch", dispatch)
    assert call(capsys, "bench", "commit", "--rows", "8", "--help") == (0, "", "")
    assert call(capsys, "bench", "attention") == (0, "", "")
    assert call(capsys, "demo", "--json", "more") == (0, "", "")
    assert call(capsys, "generate", "--prompt", "a") == (0, "", "")
    assert call(capsys, "report") == (0, "", "")
    assert call(capsys, "worker", "--port", "0") == (0, "", "")
    assert seen == [
        ("bench.commit", ["--rows", "8", "--help"]),
        ("bench.attention", []),
        ("demo", ["--json", "more"]),
        ("transformers.command", ["--prompt", "a"]),
        ("report", []),
        ("worker.command", ["--port", "0"]),
    ]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (nwor_specpv.NworError("rows: got 0, expected 1"), 2, "rows: got 0, expected 1"),
        (ValueError("a\nb"), 1, "ValueError: a b"),
        (ModuleNotFoundError("No module named 'x'"), 1, "ModuleNotFoundError: No module named 'x'"),
        (BrokenPipeError(), 1, None),
        (KeyboardInterrupt(), 130, None),
    ],
)
def test_a_failing_command_is_one_line(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    line: str | None,
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    assert cli.main(["demo"]) == code
    assert capfd.readouterr().err == (f"nwor-specpv: {line}\n" if line else "")


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    command = f"{shlex.quote(sys.executable)} -m nwor_specpv status | true"
    answer = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env=dict(os.environ), timeout=300
    )
    assert answer.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--version >/dev/full", "OSError: [Errno 28] No space left on device"),
        ("--help >/dev/full", "OSError: [Errno 28] No space left on device"),
        ("doctor --help >/dev/full", "OSError: [Errno 28] No space left on device"),
        ("status >/dev/full", "OSError: [Errno 28] No space left on device"),
        ("--version >&-", "standard output is closed; /dev/null takes what is not wanted"),
        ("status >&-", "standard output is closed; /dev/null takes what is not wanted"),
    ],
)
def test_an_output_that_takes_nothing_is_one_line_and_exit_1(arguments: str, line: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m nwor_specpv {arguments}"
    # What is printed fails at once, or when it is flushed; argparse forgives help the former.
    for unbuffered in ("",) if "--help" in arguments else ("", "1"):
        answer = subprocess.run(
            ["sh", "-c", command],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            timeout=300,
        )
        assert (answer.returncode, answer.stderr) == (1, f"nwor-specpv: {line}\n")
