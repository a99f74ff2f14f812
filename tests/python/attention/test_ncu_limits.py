"""benchmarks/ncu_limits.py reads what Nsight Compute writes."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "ncu_limits.py"
WAIT = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
UNITS = {
    "ID": "",
    "Kernel Name": "",
    "gpu__time_duration.sum": "us",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": "%",
    "gpu__dram_throughput.max.pct_of_peak_sustained_elapsed": "%",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": "%",
    "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active": "%",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "%",
    WAIT.format("barrier"): "inst",
    WAIT.format("long_scoreboard"): "inst",
    WAIT.format("long_scoreboard_not_issued"): "inst",
}
PLAN = {"device": "a GPU", "torch": "2", "commit": "abc"}
OURS, THEIRS, SPIN = "nwor::sm90::VerifyKernel<x>", "flash::kernel", "spin_kernel(long)"


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("ncu_limits", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, kernels: list[tuple[str, str]], calls: int, unit: str = "us") -> list[Path]:
    """A raw page of kernels, by name and time, and the plan of so many calls."""
    raw, plan = folder / "raw.csv", folder / "plan.json"
    with raw.open("w", newline="") as output:
        output.write("==PROF== a line of the tool's own\n")
        table = csv.writer(output, quoting=csv.QUOTE_ALL)
        table.writerow(UNITS)
        table.writerow((UNITS | {"gpu__time_duration.sum": unit}).values())
        for i, (name, time) in enumerate(kernels):
            table.writerow([i, name, time, "81.5", "97", "28.25", "2.6", "22", "0.5", "11.5", "9"])
    case = {"name": "8 x 32768", "rows": 8, "cache": "bfloat16", "kv_bytes": 1}
    of = ["ours", "FA3"] * calls
    plan.write_text(json.dumps(PLAN | {"calls": [{"of": name} | case for name in of[:calls]]}))
    return [plan, raw]


def test_a_call_is_its_longest_kernel(
    limits: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = [("plan", "3"), (OURS, "1,261.5"), (SPIN, "9999"), (THEIRS, "256"), (SPIN, "1")]
    paths, found = write(tmp_path, kernels, 2), tmp_path / "found.json"
    assert limits.table(*paths, found) == 0
    ours, theirs = json.loads(found.read_text())["calls"]
    assert (ours["kernel"], ours["kernels"], ours["us"]) == (OURS, 2, 1261.5)
    assert ours["call_us"] == 1264.5
    assert (theirs["kernel"], theirs["us"]) == (THEIRS, 256.0)
    percents = {name: ours[f"{name}_percent"] for name in ("dram", "tensor", "issue")}
    assert percents == {"dram": 81.5, "tensor": 28.25, "issue": 22.0}
    assert ours["matrix_issue_percent"] == 2.6
    assert list(ours["waits"].items()) == [("long_scoreboard", 11.5), ("barrier", 0.5)]
    told = capsys.readouterr().out.splitlines()
    assert told[2].split() == [
        "8", "x", "32768", "32/8x128", "8", "bfloat16", "ours", "1261.5", "82", "28", "22",
        "long_scoreboard", "11.50,", "barrier", "0.50",
    ]  # fmt: skip


def test_every_shape_that_ends_up_in_a_table_is_profiled(
    limits: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list(limits.shapes())
    assert len(set(found)) == len(found)
    for heads in ((14, 2, 64), (12, 2, 128), (9, 3, 64)):
        assert {rows for of, rows, _, lens in found if of == heads and len(lens) == 32} == {5, 16}
    float8 = {(rows, lens) for _, rows, cache, lens in found if cache == "float8_e4m3fn"}
    assert {(1, (32768,)), (8, (4608,) * 32), (16, (32768,) * 8)} <= float8
    monkeypatch.setenv("NWOR_NCU_ONLY", "12/2x128 16 bfloat16 32x")
    assert list(limits.shapes()) == [((12, 2, 128), 16, "bfloat16", (4608,) * 32)]


def test_units_of_time(limits: ModuleType, tmp_path: Path) -> None:
    paths, found = write(tmp_path, [(OURS, "261,500"), (SPIN, "1")], 1, "ns"), tmp_path / "found"
    assert limits.table(*paths, found) == 0
    assert json.loads(found.read_text())["calls"][0]["us"] == 261.5


def test_a_page_of_another_plan_is_refused(limits: ModuleType, tmp_path: Path) -> None:
    paths = write(tmp_path, [(OURS, "261"), (SPIN, "1")], 2)
    with pytest.raises(SystemExit, match="got 1 calls, expected 2"):
        limits.table(*paths, None)
