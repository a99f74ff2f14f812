"""`nwor-specpv bench session` runs, checks itself, writes what it prints; no figure is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nwor_specpv.bench import session


def test_prints_a_line_per_variant_and_writes_json(tmp_path: Path, capsys) -> None:
    file = tmp_path / "report.json"
    sizes = ["--short", "40", "--long", "600", "--replays", "3"]
    assert session.main([*sizes, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    report = json.loads(file.read_text())
    assert report["lengths"] == [40, 600]
    assert report["results"].keys() == session.VARIANTS.keys()
    for name, result in report["results"].items():
        assert name in printed
        assert result["ratio"] == pytest.approx(result["us"][1] / result["us"][0])


def test_a_wrong_length_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "DRAFTS", 3)
    variant = session.session_variant(40)
    monkeypatch.setattr(session, "DRAFTS", 4)
    with pytest.raises(RuntimeError, match="session: 43 tokens, not 44"):
        variant[0]()


@pytest.mark.parametrize("arguments", [["--short", "1"], ["--replays", "0"]])
def test_wrong_use_ends_with_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        session.main(arguments)
    assert caught.value.code == 2
