"""`nwor-specpv bench attention` runs, checks itself, writes what it prints; no figure is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nwor_specpv.bench import attention, peers
from nwor_specpv.bench.timing import Timing
from tests.python.attention.steps import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_prints_a_line_per_case_and_writes_json(device: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "report.json"
    sizes = ["--prefix", "100", "--batch", "2", "--rows", "1,70", "--heads", "4/2"]
    shape = ["--head-dim", "64", "--dtype", "bfloat16", "--mask", "chain", "tree"]
    assert (
        attention.main(["--device", device, *sizes, *shape, "--replays", "2", "--json", str(file)])
        == 0
    )
    printed = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert [(r["rows"], r["mask"]) for r in report["results"]] == [
        (1, "chain"),
        (1, "tree"),
        (70, "chain"),
        (70, "tree"),
    ]
    for result in report["results"]:
        assert result["case"] in printed
        assert result["max_error"]["ours"] < 0.02
        assert result["ratio"].keys() == result["us"].keys() - {"ours", "read"}
        assert result["route"].startswith(device)


def test_a_wrong_result_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.verify_attention
    monkeypatch.setattr(attention, "verify_attention", lambda *a, **k: right(*a, **k).add_(0.1))
    with pytest.raises(AssertionError, match="error"):
        attention.main(
            ["--device", "cpu", "--prefix", "40", "--rows", "2", "--heads", "4/2", "--replays", "1"]
        )


@pytest.mark.parametrize("wrong", ["no output", "another output"])
def test_the_call_that_is_timed_is_the_one_that_is_checked(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """The form for CUDA, on the CPU: a plan is empty there, and accepted."""
    right, make = attention.verify_attention, attention.Inputs
    timed = dict.fromkeys(("ours", "read"), Timing(1.0, 0.0, 1))
    monkeypatch.setattr(attention, "Inputs", lambda case, _, seed: make(case, "cpu", seed))
    monkeypatch.setattr(attention, "capture", lambda run: run)
    monkeypatch.setattr(attention, "time_graphs", lambda *_: timed)
    monkeypatch.setattr(attention, "ROTATING_BYTES", 1)
    case = attention.Case(1, 40, 2, 4, 2, 64, torch.float32)
    flash = peers.Peer("flash", None)
    (result,) = attention.bench_cuda(case, ["tree"], 1, flash)
    assert result["max_error"]["ours"] < 1e-5

    def attend(*arguments: object, plan: torch.Tensor | None, **options: object) -> torch.Tensor:
        if plan is None:
            return right(*arguments, plan=plan, **options)
        if wrong == "no output":
            return right(*arguments, plan=plan, **(options | {"out": None}))
        return right(*arguments, plan=plan, **options).add_(0.1)

    monkeypatch.setattr(attention, "verify_attention", attend)
    with pytest.raises(AssertionError, match="error"):
        attention.bench_cuda(case, ["tree"], 1, flash)
