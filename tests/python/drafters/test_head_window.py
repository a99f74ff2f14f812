"""The benchmark of the head's window: a run from end to end with a tiny target, and its errors."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.drafters.eagle3_head import Eagle3Head, HeadShape
from nwor_specpv.models import stories
from nwor_specpv.train.target import TrainingTarget

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "head_window.py"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, with the story model, a head that has learnt nothing, and a token a letter."""
    torch.manual_seed(7)  # two computations are compared: no run may meet scores that nearly tie
    spec = importlib.util.spec_from_file_location("head_window", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    make_head().save(tmp_path / "head", dtype=torch.float32)
    monkeypatch.setattr(module, "SHIPPED", tmp_path / "head")
    monkeypatch.setattr(module, "smollm2", lambda _: stories())
    monkeypatch.setattr(module, "prompt_encoder", lambda _: lambda text: [*map(ord, text)])
    monkeypatch.setattr(module, "BEGINNING", "A horse.")
    monkeypatch.setattr(module, "ENDS", ("", "\n", " What is it?"))
    monkeypatch.setattr(module, "NEW_TOKENS", 16)
    (tmp_path / "book").write_text("Once there was a cart. It was green.\n\n" * 20)
    return module


def make_head() -> Eagle3Head:
    target = TrainingTarget(stories())
    shape = HeadShape(
        hidden=target.hidden,
        intermediate=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        target_vocabulary=target.vocabulary,
        feature_layers=target.feature_layers,
        window=9,
        rope_theta=100.0,
        norm_epsilon=1e-5,
    )
    weights = {name: torch.randn(size) * 0.3 for name, size in shape.sizes().items()}
    return Eagle3Head(shape, weights, torch.randperm(target.vocabulary)[:200])


def run(module: ModuleType, folder: Path, *more: str) -> int:
    common = ["--text", str(folder / "book"), "--json", str(folder / "out.json")]
    return module.main([*common, "--windows", "24", "3", "--contexts", "64", "40", *more])


def test_runs_and_agrees_with_the_packages_drafter(program: ModuleType, tmp_path: Path) -> None:
    assert run(program, tmp_path, "--passages", "2") == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["contexts"], found["windows"]) == ([40, 64], [3, 24, "all"])
    assert found["checked_chains"] > 0
    places = [(cell["context"], cell["window"]) for cell in found["cells"]]
    assert places == [(c, w) for c in (40, 64) for w in (3, 24, "all")]
    for cell in found["cells"]:
        assert 1 <= cell["accepted_length"] <= 5
        if cell["window"] == "all":
            assert cell["difference_to_all"] == cell["difference_to_all_error"] == 0


def test_other_chains_than_the_packages_end_it(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = program.package_chains
    monkeypatch.setattr(
        program, "package_chains", lambda *a: [[chain[0] + 1, *chain[1:]] for chain in theirs(*a)]
    )
    with pytest.raises(NworError, match="expected the drafter's"):
        run(program, tmp_path, "--passages", "1")


def test_a_short_text_is_refused(program: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "book").write_text("Once.")
    with pytest.raises(NworError, match="got a passage of 13 tokens, expected 64"):
        run(program, tmp_path)


def test_errors_are_those_of_passages(program: ModuleType) -> None:
    tokens = [20, 26, 23, 31]
    mean, error = program.mean_and_error(tokens, [10] * 4)
    assert mean == pytest.approx(2.5)
    assert error == pytest.approx(statistics.stdev(tokens) / 10 / 2)
    assert program.mean_and_error([20], [10]) == (2.0, None)
