"""`nwor-specpv bench retrieval` runs, checks itself, writes what it prints; no figure is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nwor_specpv.bench import partial_step, retrieval
from nwor_specpv.bench.partial_step import Commits, Shape, Step
from tests.python.specpv.contexts import DEVICES


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
    assert set(commits["us"]) == {"alone", "compact views"}
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


def test_a_view_that_was_given_up_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def given_up(*arguments: torch.Tensor) -> None:
        arguments[-2].fill_(-1)

    monkeypatch.setattr(retrieval, "build_views", given_up)
    sizes = ["--tokens", "512", "--rows", "2", "--heads", "2/1", "--head-dim", "64"]
    with pytest.raises(AssertionError, match="view"):
        retrieval.main(["--device", "cpu", *sizes, "--replays", "1"])


def small(tokens: int = 0) -> Shape:
    sizes = {"rows": 6, "layers": 2, "heads": 4, "kv_heads": 2, "dim": 64}
    return Shape(3, tokens, **sizes, dtype=torch.float32, device="cpu")


def test_a_step_without_a_view_is_no_partial_one(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(small(512))
    assert step.check() < 1e-4
    monkeypatch.setattr(step, "build", lambda: step.num_blocks.fill_(-1))
    with pytest.raises(AssertionError, match="view"):
        step.check()


@pytest.mark.parametrize("viewed", [False, True])
@pytest.mark.parametrize("wrong", ["no output", "another output"])
def test_a_step_with_a_wrong_output_stops_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, viewed: bool, wrong: str
) -> None:
    right = partial_step.verify_attention

    def attend(*arguments: object, view: object, out: torch.Tensor, **options: object) -> None:
        if wrong == "another output" or (view is not None) != viewed:
            right(*arguments, view=view, out=out, **options)
        if wrong == "another output" and (view is not None) == viewed:
            out += 0.1

    step = Step(small(512))
    monkeypatch.setattr(partial_step, "verify_attention", attend)
    with pytest.raises(AssertionError, match="an output is off"):
        step.check()


def test_commits_are_checked_in_every_form() -> None:
    Commits(small()).check()


@pytest.mark.parametrize(("leave_out", "told"), [("all", "rows"), ("tail", "views")])
def test_a_commit_that_leaves_something_out_stops_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, leave_out: str, told: str
) -> None:
    right = partial_step.commit

    def commit(*arguments: object, **options: object) -> None:
        if leave_out != "all":
            right(*arguments, **(options | {leave_out: None}))

    commits = Commits(small())
    monkeypatch.setattr(partial_step, "commit", commit)
    with pytest.raises(AssertionError, match=told):
        commits.check()
