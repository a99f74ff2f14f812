"""tools/gpu_tests.py, with tests of its own, a made-up compute-sanitizer and a made-up GPU."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.python.packaging.made_up_gpu import FOUND, TOOL, Tool, load_tool, made_up_gpu


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tool]:
    with made_up_gpu(tmp_path, monkeypatch) as found:
        yield found


# ---- what runs ----


def test_every_check_runs_every_test_of_kernels(tool: Tool) -> None:
    assert tool.call("kernels", "sanitizers", checks=["memcheck", "racecheck"]) == 0
    for check in ("plain", "memcheck", "racecheck"):
        outcomes = tool.outcomes(check)
        assert "test_of_the_cpu" not in outcomes
        assert outcomes["test_of_a_device"] == "passed"
        assert Counter(outcomes.values()) == {"passed": 8, "skipped": 1}
    data = tool.data
    assert data["findings"] == []
    setting = data["setting"]
    assert setting["sources"] == tool.module.digest_of(tool.root)
    assert (setting["device"], setting["driver"]) == ("Made-up GPU", "580.1")
    assert (setting["commit"], setting["dirty"]) == ("abcdef", None)  # no checkout
    assert all(entry["seconds"] >= 0 for entry in data["tests"])


def test_what_a_test_stands_for_is_recorded(tool: Tool) -> None:
    marked = "import pytest\n@pytest.mark.serves('staging', 'V1')\ndef test_it():\n    pass\n"
    tool.write("pytest.ini", "[pytest]\nmarkers = serves\n")
    tool.write("vllm/test_a.py", marked)
    assert tool.call("vllm") == 0
    assert tool.data["serves"] == {"vllm/test_a.py::test_it": ["staging on V1"]}


def test_sanitizers_leave_whole_models_out(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool.module, "NOT_SANITIZED", "test_some.py::test_cuda_graph")
    assert tool.call("kernels", "sanitizers", checks=["memcheck"]) == 0
    assert tool.outcomes("plain")["test_cuda_graph"] == "passed"
    assert set(tool.outcomes("plain")) - set(tool.outcomes("memcheck")) == {"test_cuda_graph"}


@pytest.mark.parametrize(("free", "at_once"), [("30000", 1), ("50000", 2)])
def test_vllm_has_as_many_processes_as_memory_holds(tool: Tool, free: str, at_once: int) -> None:
    """Of one file each, and of a few of its tests."""
    tests = """
import os, pathlib, time
import pytest

@pytest.mark.parametrize("n", range(6))
def test_beside_others(n):
    here = pathlib.Path("busy", str(os.getpid()))
    here.parent.mkdir(exist_ok=True)
    here.touch()
    time.sleep(0.4)
    with open("seen", "a") as file:
        file.write(f"{os.getpid()} {len(list(here.parent.iterdir()))} ")
    here.unlink()
"""
    tool.write("free", free)
    for name in ("a", "b"):
        tool.write(f"vllm/test_{name}.py", tests)
    assert tool.call("vllm", jobs=4) == 0
    seen = (tool.root / "seen").read_text().split()
    assert (len(seen[::2]), len(set(seen[::2]))) == (12, 4)
    assert max(map(int, seen[1::2])) == at_once


def test_a_test_that_wants_the_gpu_for_itself_runs_first_and_alone(tool: Tool) -> None:
    alone = """
import pathlib, time, pytest

@pytest.mark.alone
def test_measures_what_is_free():
    time.sleep(0.5)
    pathlib.Path("measured").touch()

def test_later():
    assert pathlib.Path("measured").exists()
"""
    beside = "import pathlib\ndef test_cuda():\n    assert pathlib.Path('measured').exists()\n"
    tool.write("pytest.ini", "[pytest]\nmarkers = alone\n")
    tool.write("vllm/test_a.py", alone)
    tool.write("test_some.py", beside)
    assert tool.call("kernels", "vllm", jobs=4) == 0


def test_vllm_waits_until_there_is_memory(tool: Tool) -> None:
    tool.write("free", "1000")
    slow = "import time, pathlib\ndef test_cuda():\n    time.sleep(1)\n    "
    tool.write("test_some.py", slow + "pathlib.Path('over').touch()\n")
    after = "import pathlib\ndef test_after():\n    assert pathlib.Path('over').exists()\n"
    tool.write("vllm/test_a.py", after)
    shards = tool.module.shards_of
    # The kernels are under way when vLLM's turn comes.
    tool.module.shards_of = lambda *args: sorted(shards(*args), key=lambda s: s.group)
    assert tool.call("kernels", "vllm", jobs=4) == 0


@pytest.mark.parametrize("chosen", [None, "3"])
def test_processes_share_the_cores(
    tool: Tool, monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    expected = chosen or str(max(1, cores // 2))
    tests = f"""
import os

def test_cuda_one():
    assert os.environ["OMP_NUM_THREADS"] == "{expected}"
"""
    tool.write("test_some.py", tests)
    assert tool.call("kernels", "sanitizers", checks="racecheck", jobs=2) == 0


# ---- calls that go on ----


def test_what_has_run_is_not_run_again(tool: Tool) -> None:
    """Another group is added; a failure is run again when asked; other sources are another file."""
    tests = """
import pathlib

def test_cuda_one():
    with open("calls", "a") as file:
        file.write("x")

def test_cuda_two():
    print("printed before the end")
    assert pathlib.Path("fixed").exists()
"""
    calls = tool.root / "calls"
    tool.write("test_some.py", tests)
    assert tool.call("kernels") == 1
    failed = tool.entry("test_cuda_two")
    assert failed["outcome"] == "failed"
    assert "assert pathlib" in failed["text"]
    assert "printed before the end" in failed["text"]
    tool.write("test_host.py", "def test_host(): pass\n")
    assert tool.call("kernels", "host") == 1
    assert calls.read_text() == "x"
    assert tool.outcomes()["test_host"] == "passed"
    tool.write("fixed", "")
    arguments = ["--groups", "kernels", "host", "--json", str(tool.file), "--retry"]
    assert tool.module.main(arguments) == 0
    assert calls.read_text() == "x"
    assert set(tool.outcomes().values()) == {"passed"}
    tool.write("csrc/other.cpp", "")
    assert tool.call("kernels") == 0
    assert calls.read_text() == "xx"
    assert "test_host" not in tool.outcomes()
    earlier = json.loads(tool.file.with_suffix(".earlier.json").read_text())
    assert len(earlier["tests"]) == 3


def test_a_call_ends_in_time_and_the_next_one_goes_on(
    tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test that has begun before the grace goes on; the one behind it is left."""
    tests = """
import pathlib, time

def test_cuda_fast():
    pass

def test_cuda_late():
    pathlib.Path("late").touch()
    time.sleep(0 if pathlib.Path("again").exists() else 600)

def test_cuda_last():
    pass
"""
    tool.write("test_some.py", tests)
    late, now = tool.root / "late", time.monotonic
    clock = tool.module.time
    monkeypatch.setattr(clock, "monotonic", lambda: now() + 1000 * late.exists())
    assert tool.call("kernels", minutes=10, test_minutes=100) == 75
    pending = {"test_cuda_fast": "passed", "test_cuda_late": "not run", "test_cuda_last": "not run"}
    # One process, in which the fast one is over when the late one begins.
    assert tool.outcomes() in (pending, pending | {"test_cuda_last": "passed"})
    monkeypatch.setattr(clock, "monotonic", now)
    tool.write("again", "")
    assert tool.call("kernels", minutes=10) == 0


def test_no_test_begins_when_the_time_is_up(tool: Tool, tmp_path: Path) -> None:
    tool.write("test_some.py", "def test_cuda_one(): pass\ndef test_cuda_two(): pass\n")
    lines, log = tmp_path / "lines", tmp_path / "some.log"
    shard = tool.module.Shard("kernels", "plain", ["test_some.py"])
    shard.start(tool.root, log, 1.0, 1)
    assert shard.process.wait() == 2
    shard.poll()
    assert list(shard.seen) == ["test_some.py::test_cuda_one"]
    assert shard.end == {"end": 2, "stopped": True}
    assert not lines.exists()


def test_asked_to_end_it_tells_what_has_run_and_leaves_nobody_behind(tool: Tool) -> None:
    tests = """
import os, signal, time

def test_cuda_fast():
    pass

def test_cuda_last():
    open("pid", "w").write(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)
"""
    tool.write("test_some.py", tests)
    assert tool.call("kernels") == 75
    assert tool.outcomes() == {"test_cuda_fast": "passed", "test_cuda_last": "not run"}
    with pytest.raises(ProcessLookupError):
        os.kill(int((tool.root / "pid").read_text()), 0)


def test_part_of_a_line_is_read_when_it_is_whole(tool: Tool, tmp_path: Path) -> None:
    shard = tool.module.Shard("kernels", "plain", ["a"], log=tmp_path / "some.log")
    shard.process = type("Running", (), {"poll": lambda _: None})()
    lines = tmp_path / "some.jsonl"
    lines.write_text('{"begun": "a"}\n{"test": "a", "outc')
    shard.poll()
    assert (shard.begun, shard.seen) == ("a", {})
    with lines.open("a") as file:
        file.write('ome": "passed"}\n')
    shard.poll()
    assert (shard.begun, shard.seen) == (None, {"a": {"outcome": "passed"}})


# ---- what goes wrong ----


def test_a_test_that_ends_its_process_has_failed_and_the_others_run(tool: Tool) -> None:
    tests = """
import os

def test_cuda_one(): pass
def test_cuda_ends():
    print("last words", flush=True)
    os._exit(3)
def test_cuda_two(): pass
"""
    tool.write("test_some.py", tests)
    assert tool.call("kernels", "sanitizers", checks="memcheck") == 1
    expected = dict.fromkeys(("test_cuda_one", "test_cuda_two"), "passed")
    for check in ("plain", "memcheck"):
        assert tool.outcomes(check) == expected | {"test_cuda_ends": "failed"}
    ended = [e for e in tool.data["tests"] if e["outcome"] == "failed"]
    assert all("the process ended with 3" in entry["text"] for entry in ended)
    assert all("test_cuda_ends" in entry["text"] for entry in ended)


def test_a_test_that_never_ends_has_failed_and_the_others_run(
    tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the process had done before counts."""
    module, stopped = tool.module, []
    results = module.Results(tool.file, {})
    results.plan("kernels", ["plain"], ["a", "b", "c"])
    shard = module.Shard("kernels", "plain", ["a", "b", "c"], log=tool.root / "some.log", begun="b")
    shard.log.write_text("the end of its output")
    shard.seen = {"a": {"outcome": "passed", "seconds": 1.0, "text": ""}}
    monkeypatch.setattr(shard, "poll", lambda: None)
    monkeypatch.setattr(shard, "stop", lambda: stopped.append(shard))
    pool = module.Pool(results, module.Limits(jobs=1, test_seconds=60), tool.root)
    pool._running.append(shard)
    shard.news_at = time.monotonic()
    assert pool._look() == []
    assert not stopped
    shard.news_at -= 100
    (owed,) = pool._look()
    assert set(stopped) == {shard}
    assert (pool._running, owed.tests) == ([], ["c"])
    outcomes = {key[2]: entry["outcome"] for key, entry in results.tests.items()}
    assert outcomes == {"a": "passed", "b": "failed", "c": "not run"}
    text = results.tests["kernels", "plain", "b"]["text"]
    assert text == "no news for 60 s\nthe end of its output"


def test_a_process_that_ends_badly_behind_its_tests_is_no_success(tool: Tool, capsys: Any) -> None:
    tests = "import atexit, os\ndef test_cuda_one(): atexit.register(os._exit, 5)\n"
    tool.write("test_some.py", tests)
    assert tool.call("kernels") == 1
    assert tool.outcomes() == {"test_cuda_one": "passed"}
    (found,) = tool.data["findings"]
    assert found["kind"] == "process"
    assert found["text"].startswith("ended with 5")
    assert "process: test_some.py::test_cuda_one: ended with 5" in capsys.readouterr().out


def test_tests_that_all_skip_are_no_success(tool: Tool) -> None:
    tool.write("test_some.py", "import pytest\ndef test_cuda(): pytest.skip('no library')\n")
    assert tool.call("kernels") == 1
    assert tool.entry("test_cuda")["text"] == "Skipped: no library"


def test_tests_that_cannot_be_collected_are_said(tool: Tool) -> None:
    tool.write("test_some.py", "import nothing_of_this_name\ndef test_cuda(): pass\n")
    with pytest.raises(SystemExit, match="no tests of kernels were collected"):
        tool.call("kernels")


# ---- sanitizers ----

LAUNCHES = """
import pytest, torch

KERNELS = {"a": ["nwor::One<1>"], "b": ["nwor::One<2>", "nwor::One<3>"], "c": ["nwor::One<2>"],
           "d": ["cublas"]}

@pytest.mark.parametrize("name", KERNELS)
def test_cuda(name):
    torch.launched.extend(KERNELS[name])

@pytest.mark.parametrize("n", range(9))
def test_cuda_too(n):
    torch.launched.append("nwor::One<1>")

def test_cuda_of_no_kernel():
    pass
"""


def test_sanitizers_look_at_every_kernel_and_function(tool: Tool) -> None:
    tool.write("test_some.py", LAUNCHES)
    assert tool.call("sanitizers", checks=["memcheck", "racecheck"], all_tests=False) == 0
    assert len(tool.outcomes("launches")) == 14
    seen, kernels = {}, tool.data["kernels"]
    for entry in (one for one in tool.data["tests"] if one["check"] == "launches"):
        launched = {kernels[place] for place in entry.get("launches", [])}
        seen[entry["test"].partition("::")[2]] = launched
        assert "cublas" not in launched
    for check in ("memcheck", "racecheck"):
        tests = tool.outcomes(check)
        assert {test.partition("[")[0] for test in tests} == {"test_cuda", "test_cuda_too"}
        assert set().union(*(seen[test] for test in tests)) == set(kernels)
        assert len(tests) <= 3
        assert set(tests.values()) == {"passed"}


def test_sanitizers_choose_when_all_launches_are_known(tool: Tool) -> None:
    """A test that fails hides what it would have launched."""
    tool.write("test_some.py", LAUNCHES + "\ndef test_cuda_fails():\n    assert False\n")
    assert tool.call("sanitizers", checks="memcheck", all_tests=False) == 1
    assert set(tool.outcomes("memcheck").values()) == {"passed"}
    assert tool.outcomes("launches")["test_cuda_fails"] == "failed"


def test_a_profiler_that_sees_nothing_is_no_success(tool: Tool) -> None:
    tool.write("test_some.py", "def test_cuda(): pass\n")
    with pytest.raises(SystemExit, match="has seen no launch of ours"):
        tool.call("sanitizers", checks="memcheck", all_tests=False)


def test_the_fewest_tests_launch_what_all_do(tool: Tool) -> None:
    launches = tool.module.launches
    launched = {"f[0]": [0, 1], "f[1]": [2], "f[2]": [2, 3, 4], "g": [], "h[0]": [0], "h[1]": [0]}
    seconds = {"f[0]": 3.0, "f[1]": 1.0, "h[0]": 0.5, "h[1]": 0.1}
    # The quickest of each function, and of the others those with most that is left.
    assert launches.chosen(launched, seconds | {"f[2]": 9.0}) == ["f[0]", "f[1]", "f[2]", "h[1]"]
    assert launches.chosen(launched, seconds) == ["f[0]", "f[2]", "h[1]"]
    assert launches.chosen({}, {}) == []


def test_a_finding_is_no_success(tool: Tool) -> None:
    tool.sanitizer('echo "========= ERROR SUMMARY: 2 errors"; code=9')
    assert tool.call("kernels", "sanitizers", checks="memcheck") == 1
    assert tool.call("kernels") == 0
    assert {found["kind"] for found in tool.data["findings"]} == {"finding"}
    assert "2 findings" in tool.data["findings"][0]["text"]
    blamed = [test for found in tool.data["findings"] for test in found["tests"]]
    assert sorted(blamed) == sorted({entry["test"] for entry in tool.data["tests"]})
    tool.sanitizer()
    arguments = ["--groups", "sanitizers", "--checks", "memcheck", "--json", str(tool.file)]
    arguments.append("--all-tests")
    assert tool.module.main([*arguments, "--retry"]) == 0
    assert tool.data["findings"] == []


LOUD = """
import os

def test_cuda_quiet():
    pass

def test_cuda_loud(capfd):
    with capfd.disabled():
        os.write(1, b"========= Barrier error detected. Divergent thread(s) in warp\\n")
        os.write(1, b"=========     at some kernel\\n")
"""


def test_what_a_sanitizer_says_is_kept_with_its_test(tool: Tool) -> None:
    """It speaks in the midst of a line, and that test has passed all the same."""
    tool.write("test_some.py", LOUD)
    tool.sanitizer('echo "========= ERROR SUMMARY: 1 error"; code=9')
    assert tool.call("sanitizers", checks="synccheck") == 1
    assert set(tool.outcomes("synccheck").values()) == {"passed"}
    (found,) = tool.data["findings"]
    assert found["tests"] == ["test_some.py::test_cuda_loud"]
    assert found["text"] == "Barrier error detected. Divergent thread(s) in warp"


@pytest.mark.parametrize("beside", [0, 1])
def test_a_launch_not_looked_at_is_neither_a_finding_nor_a_success(tool: Tool, beside: int) -> None:
    tests = """
import os

def test_cuda_launches(capfd):
    with capfd.disabled():
        os.write(1, b"========= Internal Sanitizer Error: no memory to track the launch\\n")
"""
    tool.write("test_some.py", tests)
    tool.sanitizer(f'echo "========= ERROR SUMMARY: {1 + beside} error"; code=9')
    assert tool.call("sanitizers", checks="synccheck") == 1
    kinds = [found["kind"] for found in tool.data["findings"]]
    assert kinds == ["finding"] * beside + ["not checked"]
    assert tool.data["findings"][-1]["text"] == "1 launches not checked"


def test_a_sanitizer_that_says_nothing_is_no_success(tool: Tool) -> None:
    tool.sanitizer(":")
    assert tool.call("sanitizers", checks="racecheck") == 1
    assert all("racecheck printed no summary" in f["text"] for f in tool.data["findings"])


def test_sanitized_tests_count_when_their_process_has_ended(tool: Tool) -> None:
    """Until then the sanitizer may speak of each of them."""
    results = tool.module.Results(tool.file, {})
    shard = tool.module.Shard("kernels", "memcheck", ["a", "b"])
    shard.seen = {"a": {"outcome": "passed", "seconds": 1.0, "text": ""}}
    results.plan("kernels", ["memcheck"], ["a", "b"])
    results.take(shard)
    assert results.close(shard, None, "") == []
    assert {entry["outcome"] for entry in results.tests.values()} == {"not run"}


# ---- refusals ----


def test_it_is_refused_where_it_cannot_run(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*groups: str, **changed: Any) -> str:
        monkeypatch.setattr(tool.module, "probe", lambda _: FOUND | changed)
        with pytest.raises(SystemExit) as raised:
            tool.call(*groups)
        return str(raised.value)

    assert refused("kernels", device=None) == "gpu_tests: no CUDA device here"
    library = FOUND["library"] | {"cuda": ""}
    assert "built without CUDA kernels" in refused("kernels", library=library)
    assert "--vllm-python PYTHON" in refused("vllm", vllm=None)
    assert "no plugin nwor_specpv" in refused("vllm", plugin=False)
    (tool.root / "bin" / "compute-sanitizer").unlink()
    assert "compute-sanitizer is not on the PATH" in refused("sanitizers")


@pytest.fixture
def real_tool() -> Iterator[ModuleType]:
    """With the groups of this project."""
    before = list(sys.path)
    try:
        yield load_tool("nwor_gpu_real")
    finally:
        sys.path[:] = before
        sys.modules.pop("nwor_gpu_real", None)


def test_every_test_that_needs_a_gpu_is_in_a_group(real_tool: ModuleType) -> None:
    root = TOOL.parents[1]
    needing = [
        str(path.relative_to(root))
        for path in sorted((root / "tests").rglob("test_*.py"))
        if re.search(r"skipif\(\s*not torch\.cuda\.is_available\(\)", path.read_text())
    ]
    assert len(needing) > 20
    folders = tuple(f"{path}/" for group in real_tool.GROUPS.values() for path in group.paths)
    assert [path for path in needing if not path.startswith(folders)] == []
    left_out = real_tool.NOT_SANITIZED
    assert all(any(path.startswith(one) for path in needing) for one in left_out)


def test_the_probe_names_what_is_here(real_tool: ModuleType) -> None:
    """With this interpreter, which has no vLLM for GPUs."""
    found = real_tool.probe(sys.executable)
    assert found.keys() == FOUND.keys()
    with pytest.raises(SystemExit, match="/bin/false: failed"):
        real_tool.probe("/bin/false")
