"""tools/gpu_tests.py, with tests of its own and a made-up compute-sanitizer."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "gpu_tests.py"

TESTS = """
import os, time
import pytest

CACHED = os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") is None
TOOL = os.environ.get("SANITIZED", "plain")

@pytest.mark.parametrize("n", range(6))
def test_cuda(n):
    assert CACHED is (TOOL != "memcheck")

def test_cuda_graph():
    assert CACHED

def test_of_the_cpu():
    raise AssertionError

def test_cuda_absent():
    pytest.skip("not here")
"""
SANITIZER = """#!/bin/sh
export SANITIZED=$2
while [ "$1" != 9 ]; do shift; done
shift
"$@"
code=$?
{summary}
exit $code
"""
CLEAN = """
case $SANITIZED in
  memcheck) echo "========= ERROR SUMMARY: 0 errors";;
  racecheck) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)";;
esac
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("nwor_gpu_tests", TOOL)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    module.ROOT = tmp_path
    for folder in ("logs", "bin"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return module


def outcomes(
    tool: ModuleType, tests: str, checks: list[str], summary: str = CLEAN, jobs: int = 2
) -> dict[str, Any]:
    sanitizer = tool.ROOT / "bin" / "compute-sanitizer"
    sanitizer.write_text(SANITIZER.format(summary=summary))
    sanitizer.chmod(0o755)
    (tool.ROOT / "test_some.py").write_text(tests)
    names = tool.collect(["test_some.py"], "cuda")
    assert all("of_the_cpu" not in name for name in names)
    found = tool.run(checks, names, jobs, 600, tool.ROOT / "logs")
    return {outcome.check: outcome for outcome in found}


def test_every_check_runs_every_test(tool: ModuleType) -> None:
    found = outcomes(tool, TESTS, ["plain", "memcheck", "racecheck"])
    for outcome in found.values():
        assert outcome.troubles == []
        assert outcome.ok
        assert (outcome.counts["passed"], outcome.counts["skipped"]) == (7, 1)
        assert outcome.counts["failed"] == outcome.counts["not run"] == outcome.findings == 0


def test_a_finding_is_no_success(tool: ModuleType) -> None:
    summary = 'echo "========= ERROR SUMMARY: 2 errors"; code=9'
    found = outcomes(tool, TESTS, ["plain", "memcheck"], summary)
    assert found["plain"].ok
    assert not found["memcheck"].ok
    assert found["memcheck"].findings % 2 == 0
    assert found["memcheck"].findings > 0


def test_what_a_sanitizer_says_is_kept_with_its_test(tool: ModuleType) -> None:
    """It speaks in the midst of a line, and that test has passed all the same."""
    tests = """
import os

def test_cuda_quiet():
    pass

def test_cuda_loud(capfd):
    with capfd.disabled():
        os.write(1, b"========= Barrier error detected. Divergent thread(s) in warp\\n")
        os.write(1, b"=========     at some kernel\\n")
"""
    summary = 'echo "========= ERROR SUMMARY: 1 error"; code=9'
    outcome = outcomes(tool, tests, ["synccheck"], summary)["synccheck"]
    assert (outcome.counts["passed"], outcome.counts["not run"]) == (2, 0)
    name = "test_some.py::test_cuda_loud"
    assert outcome.said == [f"{name}: Barrier error detected. Divergent thread(s) in warp"]
    assert not outcome.ok


@pytest.mark.parametrize("beside", [0, 1])
def test_a_launch_not_looked_at_is_neither_a_finding_nor_a_success(
    tool: ModuleType, beside: int
) -> None:
    tests = """
import os

def test_cuda_launches(capfd):
    with capfd.disabled():
        os.write(1, b"========= Internal Sanitizer Error: no memory to track the launch\\n")
"""
    summary = f'echo "========= ERROR SUMMARY: {1 + beside} error"; code=9'
    outcome = outcomes(tool, tests, ["synccheck"], summary)["synccheck"]
    assert (outcome.findings, outcome.unseen) == (beside, 1)
    assert "1 launches not checked" in str(outcome)
    assert not outcome.ok


def test_a_sanitizer_that_says_nothing_is_no_success(tool: ModuleType) -> None:
    found = outcomes(tool, TESTS, ["racecheck"], summary=":")
    assert not found["racecheck"].ok
    assert "printed no summary" in found["racecheck"].troubles[0]


def test_what_fails_or_ends_its_process_is_named(tool: ModuleType) -> None:
    tests = "import os\ndef test_cuda_fails(): assert False\ndef test_cuda_ends(): os._exit(3)\n"
    (outcome,) = outcomes(tool, tests, ["plain"]).values()
    assert not outcome.ok
    assert outcome.counts == {"failed": 1, "not run": 1}
    assert "failed: test_some.py::test_cuda_fails" in outcome.troubles
    assert any("ended with 3" in trouble for trouble in outcome.troubles)


def test_what_has_not_run_in_time_is_counted(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = """
import time

def test_cuda_fast():
    pass

def test_cuda_slow():
    open("late", "w").close()
    time.sleep(600)
"""
    late, now = tool.ROOT / "late", time.monotonic
    monkeypatch.setattr(tool.time, "monotonic", lambda: now() + 1000 * late.exists())
    # One process, in which the fast one is over when the slow one begins.
    (outcome,) = outcomes(tool, tests, ["plain"], jobs=1).values()
    assert late.exists()
    assert not outcome.ok
    assert outcome.counts == {"passed": 1, "not run": 1}
    assert outcome.not_run == ["test_some.py::test_cuda_slow"]


def test_asked_to_end_it_tells_what_has_run_and_leaves_nobody_behind(tool: ModuleType) -> None:
    tests = """
import os, signal, time

def test_cuda_fast():
    pass

def test_cuda_last():
    open("pid", "w").write(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)
"""
    names = ["test_some.py::test_cuda_fast", "test_some.py::test_cuda_last"]
    (tool.ROOT / "test_some.py").write_text(tests)
    (outcome,) = tool.run(["plain"], names, 1, 300, tool.ROOT / "logs")
    assert outcome.counts == {"passed": 1, "not run": 1}
    assert outcome.not_run == names[1:]
    assert outcome.seconds < 300
    with pytest.raises(ProcessLookupError):
        os.kill(int((tool.ROOT / "pid").read_text()), 0)


@pytest.mark.parametrize("chosen", [None, "3"])
def test_processes_share_the_cores(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    expected = chosen or str(max(1, cores // 4))  # two checks of two processes
    tests = f"""
import os

def test_cuda_one():
    assert os.environ["OMP_NUM_THREADS"] == "{expected}"

def test_cuda_two():
    test_cuda_one()
"""
    found = outcomes(tool, tests, ["plain", "racecheck"])
    assert all(outcome.ok for outcome in found.values())
    assert [outcome.counts["passed"] for outcome in found.values()] == [2, 2]


def test_it_is_refused_without_a_gpu_or_the_sanitizer(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_tests.py"])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        tool.main()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("PATH", str(tool.ROOT / "bin"))
    with pytest.raises(SystemExit, match="compute-sanitizer is not on the PATH"):
        tool.main()
    assert tool.refusal(["plain"]) is None
