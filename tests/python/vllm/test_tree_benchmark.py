"""benchmarks/vllm/trees.py without an engine: what is left, acceptance, result, table."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
ORIGIN = {"device": "d", "commit": "c", "torch": "t", "vllm": "v", "layers": 2, "tokens": 8}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    for folder in ("tools", "benchmarks/vllm"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    own = ("trees", "real", "turns", "real_records", "real_engine")
    names = (*own, "tables.vllm_trees", "tables.records")
    before = set(sys.modules)
    found = {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    yield SimpleNamespace(**found)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in {
            "trees",
            "real",
            "turns",
            "real_records",
            "real_engine",
            "tables",
        }:
            del sys.modules[name]


def measured(modules: SimpleNamespace, side: str, batch: int, part: str, **found: Any) -> dict:
    cell = modules.real_records.Cell(batch, 0, part, 0.0)
    return modules.real_records.Job(cell, side, found.pop("turn", 0)).record("measured", **found)


def test_sides_and_their_drafts(modules: SimpleNamespace) -> None:
    drafts = {side: modules.trees.drafts_of(side) for side in modules.trees.SIDES["text"]}
    assert drafts["plain"] == drafts["trees"] == 0
    assert [drafts[f"chain{n}"] for n in range(1, 8)] == list(range(1, 8))
    assert [drafts[f"trees{rows}"] for rows in (4, 8, 16, 32, 64)] == [3, 7, 15, 31, 63]
    assert modules.trees.drafts_of("rows64") == 63


def test_a_stopped_run_goes_on(modules: SimpleNamespace, tmp_path: Path) -> None:
    args = modules.trees.parse(["--out", str(tmp_path), "--batch", "1", "4", "--turns", "2"])
    records = modules.real_records.Records(tmp_path / "records.jsonl")
    jobs = modules.trees.jobs(args, "shapes", "trees8")
    assert [(job.turn, job.cell.requests) for job in jobs] == [(0, 1), (0, 4), (1, 1), (1, 4)]
    records.add(jobs[0].record("measured", tokens_per_s=1.0, wall_s=1.0))
    assert records.pending(jobs) == jobs[1:]
    other = modules.trees.jobs(args, "shapes", "trees16")
    assert records.pending(other) == other


def test_a_call_without_time_starts_nothing(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules.trees, "launch", lambda *_: pytest.fail("an engine was started"))
    given = ["--out", str(tmp_path), "--parts", "text", "--sides", "plain", "--seconds", "0.001"]
    assert modules.trees.main(given) == modules.turns.UNFINISHED


@pytest.mark.parametrize(
    ("work", "status"), [("time.sleep(600)", 75), ("sys.exit(75)", 75), ("sys.exit(3)", 0)]
)
def test_what_a_deadline_leaves_is_not_a_failure(
    modules: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    work: str,
    status: int,
) -> None:
    started = []

    def launch(_: Any, variables: dict[str, str], log: Path) -> Any:
        command = [sys.executable, "-c", f"import sys, time; {work}"]
        started.append(modules.turns.launch(command, variables, log))
        return started[-1]

    monkeypatch.setattr(modules.trees, "launch", launch)
    monkeypatch.setattr(modules.real_records.Records, "start_seconds", lambda *_: 0.0)
    given = ["--out", str(tmp_path), "--parts", "text", "--sides", "plain", "chain2"]
    given += ["--batch", "1", "--turns", "1", "--together", "2", "--seconds", "2"]
    assert modules.trees.main(given) == status
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)
    records = modules.real_records.Records(tmp_path / "records.jsonl")
    jobs = modules.trees.jobs(modules.trees.parse(given), "text", "plain")
    assert records.pending(jobs) == (jobs if status else [])


def test_acceptance_is_what_text_has_shown(modules: SimpleNamespace, tmp_path: Path) -> None:
    records = modules.real_records.Records(tmp_path / "records.jsonl")
    with pytest.raises(SystemExit, match="part text with 1 request"):
        modules.trees.accepted_by_rows(records, "trees")
    assert modules.trees.accepted_by_rows(records, "plain") == {}
    for side in (*modules.trees.CHAINS, *modules.trees.TREES):
        for turn, emitted in enumerate(({"1": 5, "3": 1}, {"2": 2, "3": 2})):
            records.add(measured(modules, side, 1, "text", turn=turn, emitted=emitted))
        records.add(measured(modules, side, 4, "text", emitted={"9": 100}))
    # Of ten steps five got more than the target's own token, and three a second draft as well.
    assert modules.trees.accepted_by_rows(records, "trees16") == {"trees16": [0.5, 0.3]}
    assert modules.trees.accepted_by_rows(records, "trees").keys() == set(modules.trees.TREES)


def test_the_result_makes_the_table(
    modules: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = modules.vllm_trees
    monkeypatch.setattr(modules.records, "RESULTS", tmp_path)
    records = modules.real_records.Records(tmp_path / "records.jsonl")
    records.add({"engine": "text plain", "ready_s": 1.0} | ORIGIN)
    for side, speeds in (("plain", (1, 2, 3)), ("chain4", (200, 300, 400)), ("trees8", (330,))):
        for turn, speed in enumerate(speeds):
            records.add(measured(modules, side, 4, "text", turn=turn, tokens_per_s=float(speed)))
    for rows, ms in ((1, 5.0), (16, 5.25)):
        records.add(measured(modules, f"rows{rows}", 1, "verify", step_ms=9.0, verify_ms=ms))
    (tmp_path / "h200").mkdir()
    path = tmp_path / "h200" / "vllm_trees.json"
    assert modules.trees.write_summary(records, path) == 0
    found = json.loads(path.read_text())
    assert found["parts"]["text"]["chain4"]["4"] == {"tokens_per_s": 300.0, "turns": 3}
    assert {name: found[name] for name in ORIGIN} == ORIGIN
    records = modules.real_records.Records(tmp_path / "shapes.jsonl")
    records.add({"engine": "shapes chain4", "ready_s": 1.0} | ORIGIN)
    for side, speed in (("chain4", 200.0), ("trees", 210.0)):
        records.add(measured(modules, side, 16, "shapes", tokens_per_s=speed))
    shapes = tmp_path / "h200" / "vllm_trees_shapes.json"
    assert modules.trees.write_summary(records, shapes) == 0
    lines = list(tables.vllm_tree_lines())
    assert "| 16 | 5.25 |" in lines
    assert "| requests | chain of 4 | best chain | chosen |" in lines
    assert "| 16 | 200 | 200 (of 4) | 210 (1.05) |" in lines
    assert "| 4 | 2 | 300 | 300 (of 4) | 330 (1.10) |" in lines
