"""How `make test` counts its tests, and what lint and clang-tidy check."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ROOT / "tools"
BASH = shutil.which("bash") or "/bin/bash"


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"nwor_tool_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# ---- run_tests.py ----


def test_junit_counts_tell_skipped_from_passed(tmp_path: Path) -> None:
    module = load(TOOLS / "run_tests.py")
    path = tmp_path / "junit.xml"
    path.write_text(
        "<testsuites><testsuite>"
        "<testcase name='a' status='run'/><testcase name='b'/>"
        "<testcase name='c' status='fail'><failure message=''/></testcase>"
        "<testcase name='d'><error/></testcase>"
        "<testcase name='e' status='run'><skipped message=''/></testcase>"
        "<testcase name='f'><skipped/></testcase>"
        "<testcase name='g' status='notrun'/>"
        "</testsuite></testsuites>"
    )
    counts = module.count_junit(path)
    assert counts == {"passed": 2, "failed": 2, "skipped": 2, "disabled": 1}


@pytest.mark.parametrize(
    ("status", "xml", "ok"),
    [
        (0, "<testsuite><testcase name='a'/></testsuite>", True),
        (1, "<testsuite><testcase name='a'/></testsuite>", False),
        (0, "<testsuite><testcase name='a'><failure/></testcase></testsuite>", False),
        (0, "<testsuite><testcase name='a'><skipped/></testcase></testsuite>", False),
        (0, "<testsuite/>", False),
        (0, None, False),
    ],
)
def test_a_run_is_good_only_if_something_passed(
    tmp_path: Path, status: int, xml: str | None, ok: bool
) -> None:
    module = load(TOOLS / "run_tests.py")
    results = tmp_path / "results"
    code = f"import sys; from pathlib import Path; sys.exit({status})"
    if xml is not None:
        path = str(results / "all.xml")
        code = f"import sys; open({path!r}, 'w').write({xml!r}); sys.exit({status})"
    assert module.run("tests", [sys.executable, "-c", code], results).ok is ok


def test_results_of_an_earlier_run_do_not_count(tmp_path: Path) -> None:
    module = load(TOOLS / "run_tests.py")
    (tmp_path / "old.xml").write_text("<testsuite><testcase name='a'/></testsuite>")
    assert not module.run("tests", [sys.executable, "-c", ""], tmp_path).ok


def test_what_runs_beside_another_writes_to_a_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module, log = load(TOOLS / "run_tests.py"), tmp_path / "log"
    code = "import sys; print('one'); print('two', file=sys.stderr); sys.exit(3)"
    assert not module.run("tests", [sys.executable, "-u", "-c", code], log=log).ok
    assert capfd.readouterr().out == ""
    told = log.read_text()
    assert told.index("---- tests ") < told.index("one\ntwo\n")


@pytest.mark.parametrize("shared", [False, True], ids=["no GPU", "a GPU"])
def test_tests_that_would_share_a_gpu_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], shared: bool
) -> None:
    module, logs = load(TOOLS / "run_tests.py"), []

    def run_vllm(version: str, *, slow: bool, quick: bool, log: Path | None = None) -> str:
        logs.append(log)
        if log is not None:
            log.write_text(f"said there of {version}")
        return f"vLLM {version}" + " slow" * slow + " quick" * quick

    monkeypatch.setattr(module, "GPU", tmp_path if shared else tmp_path / "none")
    monkeypatch.setattr(module, "CURRENT", tmp_path)
    monkeypatch.setattr(module, "run_pytest", lambda *, slow: "pytest")
    monkeypatch.setattr(module, "run_vllm", run_vllm)
    oldest, *_, newest = module.vllm_versions()
    ran = module.run_side_by_side(slow=False)
    assert ran == ["pytest", f"vLLM {newest}", f"vLLM {oldest} quick"]
    versions = (newest, oldest)
    wanted = [None if shared else tmp_path / f"vllm-{version}.log" for version in versions]
    assert sorted(map(str, logs)) == sorted(map(str, wanted))
    told = capfd.readouterr().out
    for version in versions:
        assert (f"said there of {version}" in told) is not shared
    assert module.run_vllms(versions, slow=True) == [f"vLLM {newest} slow", f"vLLM {oldest} slow"]


TWO = ["--numprocesses", "2", "--dist", "loadfile"]


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ({"slow": False}, ["-m", "not slow", *TWO]),
        ({"slow": False, "quick": True}, ["-m", "not slow and quick"]),
        ({"slow": True}, TWO),
    ],
)
@pytest.mark.parametrize("gpu", [False, True])
def test_a_version_of_vllm_has_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, arguments: dict, chosen: list[str]
) -> None:
    module, commands = load(TOOLS / "run_tests.py"), []
    monkeypatch.setattr(module, "GPU", tmp_path if gpu else tmp_path / "none")
    monkeypatch.setattr(module, "cores", lambda: 4)
    if gpu:  # which some tests want for themselves
        chosen = [word for word in chosen if word not in TWO]
    monkeypatch.setattr(module, "run", lambda *given: commands.append(given))
    module.run_vllm("0.26.0", **arguments)
    ((name, command, results, _),) = commands
    assert name == "vLLM 0.26.0"
    assert command[0] == str(ROOT / ".venv-vllm-0.26.0" / "bin" / "python")
    assert command[command.index("-c") + 3 :] == chosen
    assert results == module.CURRENT / "vllm-0.26.0"


def test_versions_of_vllm_are_ordered_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load(TOOLS / "run_tests.py")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "requirements").mkdir()
    for name in ("dev.txt", "vllm-0.32.0.txt", "vllm-0.9.1.txt", "vllm-0.100.0.txt"):
        (tmp_path / "requirements" / name).touch()
    assert module.vllm_versions() == ["0.9.1", "0.32.0", "0.100.0"]


def test_random_cases_change_with_the_sources_alone(tmp_path: Path) -> None:
    module = load(TOOLS / "run_tests.py")
    seeds = []
    for place in ("one", "other"):
        for name in ("csrc/a.cpp", "python/b.py", "tests/cpp/c.h"):
            path = tmp_path / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        seeds.append(module.seed_of(tmp_path / place))
    (tmp_path / "one" / "python" / "built.so").write_text("")
    assert seeds == [module.seed_of(tmp_path / "one")] * 2
    (tmp_path / "one" / "tests" / "cpp" / "c.h").write_text("changed")
    assert module.seed_of(tmp_path / "one") != seeds[0]


# ---- clang_tidy.py ----


@pytest.fixture
def tidy_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Path]:
    """clang_tidy.py in a repository of its own with a clang-tidy that finds the word `bad`."""
    root = tmp_path / "repository"
    for name in ("tools", "csrc/metrics", "build/current"):
        (root / name).mkdir(parents=True)
    shutil.copy(TOOLS / "clang_tidy.py", root / "tools")
    (root / ".clang-tidy").write_text("Checks: x\n")
    (root / "csrc" / "types.h").write_text("int t;\n")
    (root / "csrc" / "metrics" / "a.cpp").write_text('#include "types.h"\n')
    (root / "csrc" / "metrics" / "b.cpp").write_text("int b;\n")
    entries = [
        {"directory": str(root), "file": f"csrc/metrics/{name}.cpp", "command": f"c++ {name}"}
        for name in ("a", "b")
    ]
    (root / "build" / "current" / "compile_commands.json").write_text(json.dumps(entries))
    tool = tmp_path / "clang-tidy"
    tool.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo version\nfor file do :; done\n'
        f'echo "$file" >> "{root}/log"\n'
        'if grep -q bad "$file"; then echo "$file: found it"; exit 1; fi\n'
    )
    tool.chmod(0o755)
    module = load(root / "tools" / "clang_tidy.py")
    monkeypatch.setattr(module, "find_clang_tidy", lambda: str(tool))
    monkeypatch.setattr(sys, "argv", ["clang_tidy.py", "--jobs", "1"])
    return module, root


def checked(module: ModuleType, root: Path) -> tuple[int, list[str]]:
    (root / "log").write_text("")
    status = module.main()
    return status, sorted(Path(line).name for line in (root / "log").read_text().splitlines())


def test_tidy_checks_again_only_what_changed(tidy_tree: tuple[ModuleType, Path]) -> None:
    module, root = tidy_tree
    assert checked(module, root) == (0, ["a.cpp", "b.cpp"])
    assert checked(module, root) == (0, [])
    (root / "csrc" / "metrics" / "b.cpp").write_text("int c;\n")
    assert checked(module, root) == (0, ["b.cpp"])
    (root / "csrc" / "types.h").write_text("int u;\n")
    assert checked(module, root) == (0, ["a.cpp"])
    (root / ".clang-tidy").write_text("Checks: y\n")
    assert checked(module, root) == (0, ["a.cpp", "b.cpp"])


def test_tidy_never_remembers_a_finding(
    tidy_tree: tuple[ModuleType, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    module, root = tidy_tree
    (root / "csrc" / "metrics" / "b.cpp").write_text("bad\n")
    for expected in (["a.cpp", "b.cpp"], ["b.cpp"]):
        assert checked(module, root) == (1, expected)
        assert "found it" in capsys.readouterr().out


# ---- lint.sh ----


@pytest.mark.parametrize("arguments", [[], ["--no-clang-tidy"]])
def test_lint_runs_every_check_and_leaves_out_clang_tidy_on_demand(
    tmp_path: Path, arguments: list[str]
) -> None:
    for name in ("tools", ".venv/bin"):
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(TOOLS / "lint.sh", tmp_path / "tools")
    for name in ("python", "ruff", "clang-format"):
        tool = tmp_path / ".venv" / "bin" / name
        tool.write_text(f'#!/bin/sh\necho "{name} $*"\ncase "$*" in "check -q"*) exit 1;; esac\n')
        tool.chmod(0o755)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    command = [BASH, str(tmp_path / "tools" / "lint.sh"), *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = answer.stdout.splitlines()
    assert answer.returncode == 1
    assert lines[-1] == "lint: FAILED: ruff check"
    for tool in ("check_structure.py", "readme_results.py --check"):
        assert f"python tools/{tool}" in lines
    assert "ruff format -q --check ." in lines  # after the check that failed
    assert ("python tools/clang_tidy.py" in lines) is not bool(arguments)
    assert ("lint: clang-tidy was left out; make lint runs it" in lines) is bool(arguments)


@pytest.mark.parametrize("all_", [False, True])
def test_clang_tidy_is_left_to_lint_and_test_all(
    monkeypatch: pytest.MonkeyPatch, all_: bool
) -> None:
    module, commands = load(TOOLS / "run_tests.py"), []

    def run(name: str, command: list[str], *_: object) -> object:
        commands.append(command)
        return module.Outcome(name, True, 0.0)

    monkeypatch.setattr(module, "run", run)
    monkeypatch.setattr(module, "run_side_by_side", lambda *, slow: [])
    monkeypatch.setattr(module.os, "environ", {})
    monkeypatch.setattr(sys, "argv", ["run_tests.py", *(["--all"] if all_ else [])])
    assert module.main() == 0
    assert commands[0] == [str(TOOLS / "lint.sh"), *([] if all_ else ["--no-clang-tidy"])]
