"""`nwor-specpv bench retrieval` runs, checks itself, writes what it prints; no figure is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nwor_specpv.bench import retrieval
from specpv.contexts import DEVICES


@pytest.mark.parametrize("device", DEVICES)
def test_prints_a_line_per_case_and_writes_json(device: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "report.json"
    sizes = ["--tokens", "512", "--rows", "3", "--heads", "4/2", "--head-dim", "64"]
    common = ["--score", "specpv", "quest", "--replays", "2", "--json", str(file)]
    assert retrieval.main(["--device", device, *sizes, *common]) == 0
    printed = capsys.readouterr().out
    results = json.loads(file.read_text())["results"]
    assert [r["what"] for r in results] == ["refresh", "summaries"] * 2
    for result in results:
        assert result["case"] in printed
        assert result["us"]["ours"] > 0
        assert result["us"]["torch"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_whole_steps_and_commits_that_serve_views(device: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "report.json"
    sizes = ["--tokens", "512", "--rows", "3", "--heads", "4/2", "--head-dim", "64"]
    more = ["--steps", "1024", "--commits", "3", "--layers", "2", "--replays", "1"]
    assert retrieval.main(["--device", device, *sizes, *more, "--json", str(file)]) == 0
    step, commits = json.loads(file.read_text())["results"][-2:]
    assert (step["what"], set(step["us"])) == ("step", {"full", "partial"})
    assert commits["what"] == "commit"
    assert {"alone", "partial step", "after a tail", "compact views"} <= set(commits["us"])
    assert "full / partial" in capsys.readouterr().out


def test_a_wrong_choice_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "BUDGET", 5)
    right = retrieval.select_blocks

    def wrong(*arguments: object, **options: object) -> None:
        right(*arguments, **options)
        options["out"].copy_(torch.arange(5))  # whatever the scores say

    monkeypatch.setattr(retrieval, "select_blocks", wrong)
    sizes = ["--tokens", "2048", "--rows", "2", "--heads", "2/1", "--head-dim", "64"]
    with pytest.raises(AssertionError, match="scores"):
        retrieval.main(["--device", "cpu", *sizes, "--replays", "1"])
