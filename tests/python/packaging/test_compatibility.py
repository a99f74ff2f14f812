"""The compatibility table: what is recorded of a run of tests, and what the table says of it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"
JUNIT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="serves" value="staging on V1"/></properties>
  </testcase>
<testcase name="b"><properties><property name="serves" value="staging on V1"/></properties>
  <failure/></testcase>
<testcase name="c"><properties><property name="serves" value="refresh on V2"/></properties>
  <skipped/></testcase>
<testcase name="d"/>
</testsuite></testsuites>"""


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(vllm: str, **more: Any) -> dict[str, Any]:
    found = {"vllm": vllm, "torch": "2.13.0", "python": "3.11", "machine": "m", "device": "CPU"}
    return found | {"revision": "abc", "features": {"staging on V1": {"passed": 2}}} | more


def test_tests_are_counted_by_what_they_stand_for(tmp_path: Path) -> None:
    (tmp_path / "all.xml").write_text(JUNIT)
    found = load(TOOLS / "compatibility.py").count_features(tmp_path / "all.xml")
    assert found == {"refresh on V2": {"skipped": 1}, "staging on V1": {"passed": 1, "failed": 1}}
    twice = load(TOOLS / "compatibility.py").count_features(*[tmp_path / "all.xml"] * 2)
    assert twice["staging on V1"] == {"passed": 2, "failed": 2}


def test_a_run_replaces_the_one_before_it() -> None:
    add = load(TOOLS / "compatibility.py").add
    first, other = run("0.32.0"), run("0.9.0")
    again, on_gpu = run("0.32.0", revision="new"), run("0.32.0", device="H200")
    assert add(add([], first), other) == [other, first]
    assert add([other, first], again) == [other, again]
    assert add([other, first], on_gpu) == [other, first, on_gpu]


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Over results of its own."""
    monkeypatch.syspath_prepend(str(TOOLS))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tables"]:
        monkeypatch.delitem(sys.modules, name)
    table = importlib.import_module("tables.compatibility")
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    return table


def test_the_table_says_what_ran_and_what_did_not(
    table: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"staging on V1": {"passed": 5, "failed": 1}, "refresh on V2": {"skipped": 1}}
    runs = [run("0.26.0"), run("0.32.0", features=counts | {"novel on V3": {"passed": 1}})]
    monkeypatch.setattr(table, "load", lambda _: {"runs": runs})
    lines = list(table.compatibility_lines())
    assert table.adapters() == ["0.26.0", "0.32.0", "0.33.0"]
    assert lines[2] == "|  | 0.26.0, CPU (m) | 0.32.0, CPU (m) | 0.33.0 |"
    assert "| staging, model runner V1 | 2 | 5, **1 failed** | not run |" in lines
    assert "| `refresh`, model runner V2 | - | - | not run |" in lines
    assert "| novel, model runner V3 | - | 1 | not run |" in lines


def test_the_table_has_tests_on_a_gpu(
    table: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that stand for a feature; what was not run does not count."""
    setting = {"vllm": "0.26.0", "device": "NVIDIA H200", "torch": "2.11.0+cu130"}
    setting |= {"python": "3.12.3", "commit": "0123456789abcdef"}
    outcomes = {"a": "passed", "b": "failed", "c": "not run", "d": "passed"}
    tests = [{"test": test, "outcome": outcome} for test, outcome in outcomes.items()]
    serves = {"a": ["staging on V1"], "b": ["staging on V1"], "c": ["refresh on V2"]}
    told = {"setting": setting, "serves": serves, "tests": tests}
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "gpu_tests.json").write_text(json.dumps(told))
    monkeypatch.setattr(table, "load", lambda _: {"runs": [run("0.32.0"), run("0.26.0")]})
    lines = list(table.compatibility_lines())
    assert lines[2] == "|  | 0.26.0, CPU (m) | 0.26.0, H200 (x86_64) | 0.32.0, CPU (m) | 0.33.0 |"
    assert any(line.startswith("| Python | ") and " | 3.12 | " in line for line in lines)
    assert "| staging, model runner V1 | 2 | 1, **1 failed** | 2 | not run |" in lines
    assert "| `refresh`, model runner V2 | - | - | - | not run |" in lines
