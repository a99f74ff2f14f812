"""The matrix of benchmarks/generate_matrix.py: its cells, prompts and shares, and going on."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from nwor_specpv import NworError
from nwor_specpv.transformers import Generation, Generator
from tests.python.specpv.contexts import seeded
from tests.python.transformers.tiny_models import Oracle, decode_plainly, random_prompt, tiny

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "generate_matrix.py"


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_matrix", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Letters:
    def __call__(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[1 + ord(letter) % 90 for letter in text])


def test_cells_are_all_of_them(matrix: ModuleType) -> None:
    made = list(matrix.cells([1, 4], [100, 2048]))
    assert len(made) == len({tuple(cell.values()) for cell in made}) == 12
    assert [cell["batch"] for cell in made] == [4, 1] * 6


@pytest.mark.parametrize("kind", ["book", "log", "code"])
def test_prompts_have_their_length_and_begin_differently(matrix: ModuleType, kind: str) -> None:
    prompts = matrix.make_prompts(Letters(), kind, 4, 300)
    assert [len(prompt) for prompt in prompts] == [300] * 4
    assert len({tuple(prompt[50:]) for prompt in prompts}) == 4
    assert matrix.make_prompts(Letters(), kind, 2, 300) == prompts[:2]


def test_a_cell_tells_rates_shares_and_tokens(matrix: ModuleType) -> None:
    speeds = {"none": [10.0, 20.0, 10.0], "ngram": [5.0, 40.0, 20.0], "other": [5.0, 10.0, 5.0]}
    calls: list[str] = []

    def way(name: str):
        def run(prompts: list, tokens: int) -> SimpleNamespace:
            if tokens == 1:  # the prompts are read
                return SimpleNamespace()
            calls.append(name)
            rate = speeds[name][calls.count(name) - 1]
            ids = [[1]] if name == "other" else [[2]]
            return SimpleNamespace(stats=SimpleNamespace(tokens_per_second=rate), token_ids=ids)

        return run

    told = matrix.run_cell({name: way(name) for name in speeds}, [[1]], 4, 3)
    assert told["rates"] == speeds
    # Of all rounds together: 1/10 + 1/20 + 1/10 seconds a token, and 1/5 + 1/40 + 1/20.
    assert told["of_plain"] == pytest.approx({"none": 1.0, "ngram": 0.25 / 0.275, "other": 0.5})
    assert told["first_of_plain"] == {"none": 1.0, "ngram": 0.5, "other": 0.5}
    assert told["same_tokens"] == {"none": True, "ngram": True, "other": False}
    assert calls[:6] == ["none", "ngram", "other", "ngram", "other", "none"]


def test_a_cell_of_a_tiny_model_has_the_same_tokens(matrix: ModuleType) -> None:
    first = Generator(tiny(), drafter="none")
    other = Generator(drafter="ngram", cache_of=first)
    ways = {
        name: lambda prompts, tokens, own=own: own.generate(prompts, tokens)
        for name, own in (("none", first), ("ngram", other))
    }
    told = matrix.run_cell(ways, [[1, 2, 3, 1, 2], [4, 5, 4, 5]], 12, 2)
    assert told["same_tokens"] == {"none": True, "ngram": True}


def test_a_record_is_gone_on_with_if_it_is_of_the_same_setting(
    matrix: ModuleType, tmp_path: Path
) -> None:
    path, setting = tmp_path / "record.json", {"threads": 2, "tokens": 8}
    record = matrix.read_record(path, setting)
    assert record == setting | {"goal": 0.97, "cells": []}
    record["cells"].append({"batch": 1})
    path.write_text(json.dumps(record))
    assert matrix.read_record(path, setting) == record
    with pytest.raises(NworError, match="of another setting"):
        matrix.read_record(path, setting | {"tokens": 9})
    for damage in ("", "[]", '{"threads": 2}'):
        path.write_text(damage)
        with pytest.raises(NworError, match="no record of this script"):
            matrix.read_record(path, setting)


def test_the_worst_cell_decides(matrix: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    cell = {"batch": 8, "context": 100, "kind": "log"}
    record = {"cells": [cell | {"of_plain": {"none": 1.0, "ngram": 0.98}}]}
    assert matrix.judge(record) == 0
    record["cells"].append(cell | {"batch": 4, "of_plain": {"none": 1.0, "ngram": 0.96}})
    assert matrix.judge(record) == 1
    assert "worst: 0.960 of plain decoding (ngram, 4 x 100 log)" in capsys.readouterr().out


def test_prompts_are_read_once_however_many_ways_and_rounds(matrix: ModuleType) -> None:
    """Also by a drafter that needs the features of the prompts."""
    rng = seeded()
    prompts = [random_prompt(rng, 20, 30) for _ in range(8)]
    truths = {tuple(p): decode_plainly(tiny(), p, 6) for p in prompts}
    first = Generator(tiny(), drafter="none", cache_tokens=matrix.cache_size(8, 30, 6))
    drafter = Oracle(truths, rng, feature_layers=(1,))
    own = {
        "none": first,
        "ngram": Generator(drafter="ngram", cache_of=first),
        "eagle3": Generator(drafter=drafter, cache_of=first),
    }
    again: list[int] = []

    def way(name: str):
        def run(prompts: list, tokens: int) -> Generation:
            told = own[name].generate(prompts, tokens)
            again.append(told.stats.prompt_tokens - told.stats.reused_tokens)
            return told

        return run

    told = matrix.run_cell({name: way(name) for name in own}, prompts, 6, 3)
    assert all(told["same_tokens"].values())
    assert again[0] > 140
    assert again[1:] == [8] * 11
    matrix.run_cell({name: way(name) for name in own}, prompts[:4], 6, 1)
    assert again[12:] == [4] * 6


def test_the_table_shows_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent.parent / "tools"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tables"]:
        monkeypatch.delitem(sys.modules, name)
    table = importlib.import_module("tables.generate_matrix")

    def cell(kind: str, batch: int, share: float) -> dict:
        return {
            "batch": batch,
            "context": 100,
            "kind": kind,
            "load_average": 1.25,
            "rates": {"none": [10.0, 20.0], "ngram": [8.0, 30.0]},
            "of_plain": {"none": 1.0, "ngram": share},
            "first_of_plain": {"none": 1.0, "ngram": 0.8},
            "same_tokens": {"none": True, "ngram": True},
        }

    record = {
        "device": "CPU, 2 threads", "processor": "p", "model": "M", "dtype": "float32",
        "tokens": 64, "rounds": 2, "goal": 0.97,
        "cells": [cell("book", 8, 0.96), cell("log", 8, 1.5), cell("book", 1, 1.2)],
    }  # fmt: skip
    monkeypatch.setattr(table, "load", lambda _: record)
    lines = list(table.matrix_lines())
    assert "Least share 0.96, of first calls alone 0.80; goal 0.97." in lines[0]
    assert "texts book / log; the same tokens." in lines[0]
    assert lines[2:] == [
        "| prompts x tokens | plain, tokens per second | ngram |",
        "| --- | --- | --- |",
        "| 1 x 100 | 13.3 / - | 1.20 / - |",
        "| 8 x 100 | 13.3 / 13.3 | 0.96 / 1.50 |",
    ]
