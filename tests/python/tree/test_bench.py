"""`nwor-specpv bench tree` runs, checks itself, writes what it prints; no figure is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nwor_specpv.bench import tree
from tests.python.tree.forest import DEVICES

SMALL = ["--requests", "3", "--rows", "12", "--best", "3", "--steps", "3", "--vocabulary", "300"]


@pytest.mark.parametrize("device", DEVICES)
def test_prints_a_section_per_op_and_writes_json(device: str, tmp_path: Path, capsys) -> None:
    file = tmp_path / "report.json"
    assert tree.main(["--device", device, *SMALL, "--replays", "2", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert [one["what"] for one in report["results"]] == ["build", "greedy", "sampling"]
    for one in report["results"]:
        assert one["what"] in printed
        assert {"ours", "torch"} <= set(one["us"])
        assert set(one["ratios"]) == set(one["us"]) - {"ours"}


def test_a_wrong_result_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tree.nwor_specpv.accept_greedy

    def wrong(*given):
        path, counts, following = right(*given)
        return path, counts, following + 1

    monkeypatch.setattr(tree.nwor_specpv, "accept_greedy", wrong)
    with pytest.raises(RuntimeError, match="greedy by ours: request 0"):
        tree.main(["--device", "cpu", *SMALL, "--replays", "1"])
