"""benchmarks/vllm/specpv.py without an engine: graphs, preset acceptance, comparison, table."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv.arms import make_arms
from nwor_specpv.vllm.specpv import chain

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    for folder in ("tools", "benchmarks/vllm"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    names = ("specpv", "specpv_preset", "model_shapes", "engine_state", "tables.vllm")
    before = set(sys.modules)
    found = {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    yield SimpleNamespace(**found)
    for name in set(sys.modules) - before:
        if name in names or name.partition(".")[0] == "tables":
            del sys.modules[name]


@pytest.mark.parametrize(("side", "rows"), [("lossless", (1, 5, 8, 16)), ("self", (1, 5, 9, 17))])
def test_every_arm_has_a_graph(modules: SimpleNamespace, side: str, rows: tuple[int, ...]) -> None:
    sizes = modules.specpv.capture_sizes(side, [6, 24])
    assert sizes == sorted({batch * own for batch in (6, 24) for own in rows})
    arms = make_arms(modules.specpv.most_drafts(side), 4, long_guesses=side == "self")
    assert {1 + arm.drafts for arm in arms} == set(rows)
    assert modules.specpv.capture_sizes("stock", [8]) == [8, 40]  # heads draft single rows
    assert modules.specpv.capture_sizes("plain", [8]) == [8]


def test_passes_with_a_head_find_two_guesses_right(modules: SimpleNamespace) -> None:
    preset = modules.specpv_preset.preset("head", 0.9)
    said = torch.zeros(3, 5, dtype=torch.int64)
    assert preset.matching(said, said[:, 1:]).tolist() == [2, 2, 2]
    assert [preset.made(passes) for passes in range(4)] == [0, 3, 6, 9]
    assert preset.rates(3, 7) == [0.9, 0.9, 0.9, 1.0, 1.0, 0.0, 0.0]
    assert preset.rates(9, 7) == [0.9] * 7
    assert preset.tokens(4) == 3.0


def test_passes_without_a_head_yield_a_token_and_a_half(modules: SimpleNamespace) -> None:
    """The host knows how long chains are, and passes that were recorded in graphs count no more."""
    preset = modules.specpv_preset.preset("lookups", 0.9)
    said = torch.zeros(3, 5, dtype=torch.int64)
    preset.matching(said, said[:, 1:])  # before the first proposal, as graphs are made
    made = []
    for passes in (3, 0, 1, 3, 2):
        preset.begin()
        right = [preset.matching(said, said[:, 1:]).tolist() for _ in range(passes)]
        assert all(len(set(own)) == 1 for own in right)  # all requests alike
        made.append(preset.made(passes))
        assert made[-1] == passes + sum(own[0] for own in right)
    assert made == [4, 0, 2, 4, 3]
    assert sum(preset.made(2) for _ in range(10)) == 30
    assert preset.rates(2, 4) == [0.9, 0.9, 1 / 3, 1 / 3]
    assert preset.tokens(16) == pytest.approx(1.5, abs=1e-6)


def test_full_steps_accept_what_the_preset_says(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "matching_guesses", chain.matching_guesses)  # put back afterwards
    preset = modules.specpv_preset.preset("lookups", 0.9)
    preset.install()
    assert chain.matching_guesses == preset.matching
    rates = torch.zeros(4)
    speculator = SimpleNamespace(latest_passes=0, propose=lambda passes: passes)
    sampler = SimpleNamespace(synthetic_conditional_rates=rates)
    choice = SimpleNamespace(foresee=None)
    decisions = SimpleNamespace(scouts="some", choice=choice)
    core = SimpleNamespace(scheduler=SimpleNamespace(decisions=decisions))
    runner = SimpleNamespace(speculator=speculator, rejection_sampler=sampler)
    monkeypatch.setattr(modules.specpv_preset, "worker_runner", lambda _: runner)
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
    preset.follow(SimpleNamespace(llm_engine=engine))
    third = pytest.approx(1 / 3)
    for passes, expected in ((0, [third] * 4), (2, [0.9, 0.9, 0.9, third]), (9, [0.9] * 4)):
        speculator.latest_passes = passes
        assert speculator.propose(passes) == passes
        assert rates.tolist() == [value if value is third else pytest.approx(value)
                                  for value in expected]  # fmt: skip
    assert choice.foresee(1)[0] == pytest.approx(4 / 3)


def measured(ms: float, tokens_per_s: float, **more: Any) -> dict[str, Any]:
    return {"step_ms": ms, "tokens_per_s": tokens_per_s} | more


def test_sides_are_compared_with_their_base(
    modules: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = {"passes": 2.5, "arms": {"2 passes": 48, "3 passes": 48}}
    sides = {"plain": [measured(10, 100)], "self": [measured(20, n, **loop) for n in (290, 310)]}
    found = {
        side: [{"cells": {"8x32768": cell}, "counts": {}, "device": "d", "commit": "c"}
               for cell in cells]
        for side, cells in sides.items()
    }  # fmt: skip
    arguments = ["--sides", *sides, "--cells", "8x32768", "--json", str(tmp_path / "r.json")]
    args = modules.specpv.parse(arguments)
    modules.specpv.report(args, found)
    told = json.loads((tmp_path / "r.json").read_text())
    cell = told["cells"]["8x32768"]
    assert cell["speed"] == {"self": 3.0}
    assert cell["ratio"] == {"self": 2.0}
    assert told["agreement"] == {"self": 0.9}
    assert "300 tokens/s, 3.000 times plain, 2.50 passes" in capsys.readouterr().out
    lines = list(modules.vllm._self_lines(told))
    assert lines[-1] == "| 8 x 32768 | 10.00 | 20.00 | 100 | 300 | 2.5 | 3 |"


def test_stock_sides_have_no_keys_of_the_plugin(modules: SimpleNamespace) -> None:
    args = modules.specpv.parse(["--set", '{"specpv_draft_lookup": 2}'])
    own = {side: modules.specpv.settings_of(side, args) for side in modules.specpv.SIDES}
    assert own["stock"] == own["plain"] == {"enable_nwor": False}
    others = set(own) - set(modules.specpv.STOCK)
    assert {own[side]["specpv_draft_lookup"] for side in others} == {2}


def test_no_request_ends_in_a_cell(modules: SimpleNamespace) -> None:
    for steps, limit in itertools.product((8, 96, 500), modules.specpv.LONG_DRAFTS.values()):
        most = (1 + modules.specpv.WARM_STEPS + steps) * (1 + limit)
        assert modules.specpv.most_tokens(steps) >= most
