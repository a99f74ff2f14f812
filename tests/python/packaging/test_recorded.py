"""What is recorded: the tables of benchmarks/results, results older than their sources, and
tools/gpu_benchmarks.py with programs of its own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("stale_results", "gpu_benchmarks", "run_tests")


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """The tools, over results in a folder of the test."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "tools"), *sys.path])
    kept = {name: module for name, module in sys.modules.items() if name.startswith("tables")}
    for name in kept:
        del sys.modules[name]
    loaded = {name: importlib.import_module(name) for name in NAMES}
    loaded["recorded"] = importlib.import_module("tables.recorded")
    results = tmp_path / "benchmarks" / "results"
    (results / "h200").mkdir(parents=True)
    (results / "cpu").mkdir()
    monkeypatch.setattr(loaded["recorded"], "RESULTS", results)
    for name in ("stale_results", "gpu_benchmarks"):
        monkeypatch.setattr(loaded[name], "ROOT", tmp_path)
    yield SimpleNamespace(root=tmp_path, results=results, **loaded)
    for name in list(sys.modules):
        if name in NAMES or name.partition(".")[0] == "tables":
            del sys.modules[name]
    sys.modules.update(kept)


# ---- the list ----


def test_every_recorded_file_is_listed_once_and_measures_what_there_is() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from tables.recorded import read_results
    finally:
        sys.path.pop(0)
    results = read_results()
    files = [result.file for result in results]
    assert len(files) == len(set(files))
    here = {
        path.relative_to(ROOT / "benchmarks" / "results").as_posix()
        for folder in ("h200", "cpu")
        for path in (ROOT / "benchmarks" / "results" / folder).iterdir()
    }
    assert here - set(files) == set()
    for result in results:
        assert all((ROOT / folder).exists() for folder in result.measures), result.file
        assert result.commands or result.made_by, result.file
        for command in result.commands:
            program = command.removeprefix("python ").split()[0]
            if program not in ("nwor-specpv", "-m"):
                assert (ROOT / program).is_file(), command


def test_a_commit_is_the_entrys_or_the_files(tools: SimpleNamespace) -> None:
    made = {
        "a.json": {"revision": "0123456789ab"},
        "b.json": {"environment": {"commit": "1123456789ab"}},
        "c.json": {"setting": {"commit": "2123456789ab"}},
        "d.json": {},
    }
    for name, data in made.items():
        (tools.results / "h200" / name).write_text(json.dumps(data))
    result = tools.recorded.Result
    found = [result(f"h200/{name}").revision for name in made]
    assert found == ["0123456", "1123456", "2123456", ""]
    assert result("h200/a.json", commit="there").revision == "there"
    assert result("h200/no.txt").revision == ""


def test_the_table_has_what_is_recorded(
    tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
[sources]
one = ["csrc/one"]
[[result]]
file = "h200/a.json"
commands = ["python a.py --json FILE", "b FILE"]
note = "twice"
peers = "torch"
measures = ["one"]
[[result]]
file = "h200/absent.json"
made_by = "nobody"
"""
    (tools.results / "recorded.toml").write_text(text)
    (tools.results / "h200" / "a.json").write_text('{"revision": "0123456789ab"}')
    lines = list(tools.recorded.h200_lines())
    told = "`python a.py --json FILE`, then `b FILE`; twice"
    assert lines[2:] == [f"| `a.json` | {told} | `0123456` | torch |"]


def test_the_table_of_gpu_tests_counts_outcomes(tools: SimpleNamespace) -> None:
    assert list(tools.recorded.gpu_test_lines()) == ["No run of `make test-gpu` is recorded."]
    setting = {"device": "Made-up GPU", "driver": "1.2", "python": "3.12.3", "torch": "2.11.0"}
    setting |= {"vllm": "0.26.0", "commit": "0123456789ab", "dirty": True}
    setting |= {"library": {"for": "90a"}}
    common = {"group": "kernels", "check": "plain", "seconds": 1.5}
    tests = [common | {"test": str(n), "outcome": "passed"} for n in range(3)]
    tests.append(common | {"test": "3", "outcome": "skipped", "text": "Skipped: no library"})
    tests.append({"group": "vllm", "check": "plain", "test": "4", "outcome": "not run"})
    findings = [{"group": "kernels", "check": "plain", "kind": "process", "tests": ["0"]}]
    data = {"setting": setting, "tests": tests, "findings": findings}
    lines = list(tools.recorded.run_lines(data))
    assert "at `0123456`, with changes that are not committed: Made-up GPU" in lines[0]
    assert lines[4:6] == [
        "| kernels | plain | 3 | 0 | 1 | 0 | 1 process | 6 |",
        "| vllm | plain | 0 | 0 | 0 | 1 | nothing | 0 |",
    ]
    assert lines[-1] == "Skipped: no library (1)."


# ---- age ----


def commit_all(root: Path, day: str) -> str:
    env = os.environ | {f"GIT_{who}_DATE": f"{day}T12:00:00Z" for who in ("AUTHOR", "COMMITTER")}
    own = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(root)]
    subprocess.run([*own, "add", "-A"], check=True)
    subprocess.run([*own, "commit", "-qm", "x", "--allow-empty"], check=True, env=env)
    return subprocess.check_output([*own, "rev-parse", "HEAD"], text=True).strip()


def test_results_older_than_their_sources_are_named(
    tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tools.root
    for name in ("csrc/one/a.cu", "csrc/one/a_cpu.cpp", "csrc/two/b.cu"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("1")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    commits = [commit_all(root, "2026-01-01")]
    (root / "csrc/one/a.cu").write_text("2")
    commits.append(commit_all(root, "2026-01-02"))
    one, two = ("csrc/one",), ("csrc/two",)
    made = {
        "h200/old.json": (commits[0], one),
        "h200/new.json": (commits[1], one),
        "h200/other.json": (commits[0], two),
        "cpu/old.json": (commits[0], one),  # kernels of the GPU are none of its
        "h200/unknown.json": ("f" * 40, one),  # as in a shallow clone
        "h200/none.json": ("", one),
    }
    results = []
    for name, (revision, folders) in made.items():
        (tools.results / name).write_text(json.dumps({"revision": revision}))
        results.append(tools.recorded.Result(name, measures=folders))
    results.append(tools.recorded.Result("h200/absent.json", commit=commits[0], measures=one))
    monkeypatch.setattr(tools.stale_results, "read_results", lambda: results)
    assert tools.stale_results.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    told = "results: 1 files are older than what they measure, the oldest is h200/old.json "
    assert line.startswith(f"{told}({commits[0][:7]}, 2026-01-01)")

    (root / "csrc/one/a_cpu.cpp").write_text("3")  # not committed
    (root / "csrc/two/b.cu").write_text("3")
    assert tools.stale_results.main(["--verbose"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told[1:]] == [
        "cpu/old.json", "h200/old.json", "h200/other.json"
    ]  # fmt: skip
    assert told[1].endswith("1 files changed in csrc/one")

    monkeypatch.setenv("PATH", str(root))  # no git
    assert tools.stale_results.main([]) == 0
    assert capsys.readouterr().out == ""


# ---- measuring again ----

PROGRAM = """
import json, os, pathlib, sys
out, what = sys.argv[1:3]
with open("calls", "a") as file:
    file.write(what)
if what == "f" and not os.path.exists("mended"):
    sys.exit("no GPU memory")
if what == "k" and not os.path.exists("quick"):
    sys.exit(75)
pathlib.Path(out).write_text(json.dumps(sys.argv[2:]))
"""


@pytest.fixture
def bench(tools: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    (tools.root / "program.py").write_text(PROGRAM)
    commands = {
        "a": ["python program.py FILE a"],
        "b": ["python program.py WORK/1 b", "python program.py FILE c"],
        "f": ["python program.py FILE f"],
        "m": ["python program.py FILE FOLDER"],
        "s": ["python program.py FILE s"],
        "k": ["python program.py FILE k WORK SECONDS"],
        "n": ["python program.py elsewhere n"],
    }
    results = {
        name: tools.recorded.Result(f"h200/{name}.json", commands=tuple(lines))
        for name, lines in commands.items()
    }
    module = tools.gpu_benchmarks
    monkeypatch.setattr(module, "benchmarks", lambda: list(results.values()))
    monkeypatch.setattr(module, "RESULTS", tools.results)
    monkeypatch.chdir(tools.root)

    def call(*names: str, **options: Any) -> int:
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        words += ["--work", str(tools.root / "work"), "--into", str(tools.results / "h200")]
        return module.main([*names, *[word for word in words if word != "True"]])

    tools.calls = lambda: (tools.root / "calls").read_text()
    tools.call, tools.h200 = call, tools.results / "h200"
    return tools


def test_a_file_is_written_when_all_its_commands_are_done(
    bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    (bench.root / "WORK").mkdir()  # only whole words are replaced
    assert bench.call("a", "b", "f", "n") == 1
    assert sorted(path.name for path in bench.h200.iterdir()) == ["a.json", "b.json"]
    assert json.loads((bench.h200 / "b.json").read_text()) == ["c"]
    out = capsys.readouterr().out
    assert "f: status 1" in out
    assert "failed: f, n" in out
    assert "no GPU memory" in (bench.root / "work" / "f.log").read_text()
    assert bench.calls() == "abcfn"
    assert bench.call("a", "b", "f") == 1
    assert bench.calls() == "abcfn"
    (bench.root / "mended").touch()
    assert bench.call("a", "b", "f", retry=True) == 0
    assert bench.calls() == "abcfnf"
    (bench.root / "csrc").mkdir()
    (bench.root / "csrc" / "new.cu").touch()
    assert bench.call("a") == 0
    assert bench.calls() == "abcfnfa"


def test_a_call_ends_in_time_and_the_next_one_goes_on(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = bench.gpu_benchmarks.call

    def call(command: list[str], log: Path, deadline: float) -> int | None:
        """The one that sleeps is ended."""
        return None if command[-1] == "s" and not (bench.root / "quick").exists() else run(
            command, log, deadline
        )  # fmt: skip

    monkeypatch.setattr(bench.gpu_benchmarks, "call", call)
    assert bench.call("s", "a", minutes=9) == 75
    assert [path.name for path in bench.h200.iterdir()] == ["a.json"]
    assert "s did not end in time" in capsys.readouterr().out
    (bench.root / "quick").touch()
    assert bench.call("s", minutes=8) == 75  # not begun where it could not end
    assert bench.calls() == "a"
    (bench.root / "quick").unlink()
    assert bench.call("k", minutes=8) == 75  # by its own status
    (bench.root / "quick").touch()
    assert bench.call("s", "a", "k", minutes=10) == 0
    assert bench.calls() == "aksk"
    found = json.loads((bench.h200 / "k.json").read_text())
    assert found[1] == str(bench.root / "work" / "k")
    assert 60 < float(found[2]) < 600


def test_a_program_is_ended_at_the_deadline(bench: SimpleNamespace) -> None:
    sleeps = "import time, os; open('pid', 'w').write(str(os.getpid())); time.sleep(600)"
    deadline = time.monotonic() + 2
    log = bench.root / "log"
    assert bench.gpu_benchmarks.call([sys.executable, "-c", sleeps], log, deadline) is None
    pid = bench.root / "pid"
    if pid.exists() and pid.read_text():  # it had begun
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_a_model_is_asked_for(bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.call("m")
    assert "m needs a model: --folder m=DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.call("nothing")
    assert bench.call("m", folder="m=some/model") == 0
    assert json.loads((bench.h200 / "m.json").read_text()) == ["some/model"]
    (bench.root / "quick").touch()
    for name in "abfsn":
        (bench.root / "work" / f"{name}.json").touch()
    assert bench.call() == 1
    assert "without --folder: m" in capsys.readouterr().out


def test_commands_run_with_this_interpreter(bench: SimpleNamespace) -> None:
    argv, values = bench.gpu_benchmarks.argv, {"FILE": "a b.json"}
    assert argv("nwor-specpv bench tree --json FILE", values) == [
        sys.executable, "-m", "nwor_specpv", "bench", "tree", "--json", "a b.json"
    ]  # fmt: skip
    assert argv("benchmarks/x.sh FILE", values) == [str(bench.root / "benchmarks/x.sh"), "a b.json"]
    path = bench.gpu_benchmarks.environment()["PATH"]
    assert path.startswith(str(Path(sys.executable).parent))
