"""The command line: exit codes, one line for wrong use, one JSON document for --json."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nwor_specpv
from nwor_specpv import (
    NworError,
    _stamp,
)
from nwor_specpv.bench import report as bench_report
from nwor_specpv.bench import session as bench_session
from nwor_specpv.cli import (
    doctor,
    status,
)
from nwor_specpv.cli import main as cli
from tests.python.cli.commands import call, run

PACKAGE = Path(nwor_specpv.__file__).resolve().parent


@pytest.fixture
def broken_package(tmp_path: Path) -> Path:
    """A copy of the package whose stamp names another torch; the folder to put on the path."""
    copy = tmp_path / "nwor_specpv"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
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
    for command in ("status", "doctor", "bench", "generate", "report", "demo", "worker", "draft"):
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
    monkeypatch.setattr(bench_session, "time_calls", lambda *_, **__: pytest.fail("began the work"))
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
    assert f"--json: got '{place}', expected a file in a writable folder" in err
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


def test_doctor_json_is_one_document_and_the_core_works() -> None:
    answer = run("doctor", "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    report = json.loads(answer.stdout)
    assert report["ok"] is True
    findings = {finding["name"]: finding for finding in report["findings"]}
    core = {name for name, finding in findings.items() if finding["needed_for"] == "core"}
    assert core == {"torch", "native library", "round trip"}
    for name in ("compiler", "cmake", "ninja", "nvcc", "prometheus-cpp", "gtest", "GPU", "vllm"):
        assert findings[name]["fix"]
    assert findings["compiler"]["ok"]
    assert all(finding["detail"] for finding in findings.values())


def test_doctor_for_people_has_a_line_each_and_a_fix_for_what_is_missing(
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


def test_doctor_reports_a_wrong_torch_and_a_failed_round(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("capability", "fix"),
    [
        ((9, 0), "TORCH_CUDA_ARCH_LIST=9.0a make build"),
        ((10, 0), "TORCH_CUDA_ARCH_LIST=10.0 make build"),
        ((7, 5), "everything works on the CPU"),
    ],
)
def test_doctor_says_what_to_build_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], fix: str
) -> None:
    built = _stamp.BuildStamp("0.1.0", "2.11.0", "", (), "0123456789ab")
    monkeypatch.setattr(_stamp, "read_stamp", lambda *_: built)
    answers = {"is_available": True, "current_device": 0, "get_device_name": "Some GPU"}
    for name, answer in (answers | {"get_device_capability": capability}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    finding = doctor._gpu()
    assert not finding.ok
    assert finding.fix.startswith(fix)


def test_status_doctor_and_version_work_without_the_library(broken_package: Path) -> None:
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
    answer = run("--version", pythonpath=broken_package)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == f"nwor-specpv {_stamp.read_stamp().version}\n"
    (broken_package / "nwor_specpv" / _stamp.STAMP).unlink()
    answer = run("--version", pythonpath=broken_package)
    assert (answer.returncode, answer.stdout) == (1, "")
    assert re.fullmatch("nwor-specpv: nwor_specpv is not built: .* is missing; .*\n", answer.stderr)


def test_the_installed_command_explains_a_broken_library(broken_package: Path) -> None:
    """As pip makes it: a script of that name, which imports the package."""
    script = broken_package / "nwor-specpv"
    script.write_text("import sys\nfrom nwor_specpv.cli.main import main\nsys.exit(main())\n")
    answer = subprocess.run(
        [sys.executable, str(script), "status"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(broken_package)},
        timeout=300,
    )
    assert (answer.returncode, answer.stderr) == (1, "")
    assert re.search("^problem .*built for torch 1.0.0", answer.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "raised",
    [
        'OSError("libcudart.so.13: cannot open shared object file")',
        'ValueError("libcublas.so.*[0-9] not found")',
        "ModuleNotFoundError(\"No module named 'numbers2'\", name='numbers2')",
    ],
)
def test_a_broken_torch_is_explained(tmp_path: Path, raised: str) -> None:
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
    assert torch_finding.fix == "pip install torch==2.11.0"


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


def test_commands_get_the_rest_of_the_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(bench_session, "main", seen.append)
    assert call(capsys, "bench", "session", "--rows", "8", "--help") == (0, "", "")
    assert seen.pop() == ["--rows", "8", "--help"]
    for name, arguments, given in (
        ("demo", ("--context", "7"), {"context": 7, "json": False}),
        ("generate", ("--prompt", "a"), {"prompt": "a"}),
        ("report", (), {"source": None}),
        ("worker", ("--port", "0"), {"port": 0}),
        ("draft", ("--prompt", "a"), {"prompt": "a"}),
    ):
        module = importlib.import_module(f"nwor_specpv.cli.{name}")
        monkeypatch.setattr(module, "run", seen.append)
        assert call(capsys, name, *arguments) == (0, "", "")
        assert vars(seen.pop()).items() >= given.items()
        code, out, err = call(capsys, name, "--frobnicate")
        assert (code, out, seen) == (2, "", [])
        assert "--frobnicate" in err or "required" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("bench", "--help"),
        *(
            (name, "--help")
            for name in ("status", "doctor", "generate", "report", "demo", "worker", "draft")
        ),
    ],
)
def test_help_needs_no_library(broken_package: Path, arguments: tuple[str, ...]) -> None:
    """torch alone takes seconds."""
    (broken_package / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    (broken_package / "numpy.py").write_text("raise SystemExit('numpy was imported')\n")
    answer = run(*arguments, pythonpath=broken_package)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith(("usage: nwor-specpv", "nwor-specpv "))


def test_the_command_line_has_the_whole_package() -> None:
    """It loads names when they are first used, and keeps them."""
    code = (
        "import sys, runpy; sys.argv = ['nwor-specpv']; import nwor_specpv\n"
        "assert 'torch' not in sys.modules\n"
        "first = nwor_specpv.Interceptor\n"
        "assert vars(nwor_specpv)['Interceptor'] is first\n"
        "from nwor_specpv import _C, NworError, __version__, config\n"
        "print(first is _C.Interceptor, config.__name__, hasattr(nwor_specpv, 'Frobnicator'))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert (answer.stdout, answer.stderr) == ("True nwor_specpv.config False\n", "")


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

    monkeypatch.setattr("nwor_specpv.cli.demo.run", fail)
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
        ("--version >&-", "standard output is closed; send it to /dev/null"),
        ("status >&-", "standard output is closed; send it to /dev/null"),
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
