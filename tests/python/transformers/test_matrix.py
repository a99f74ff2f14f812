"""The matrix of benchmarks/generate_matrix.py: its cells, prompts and shares, and going on."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from nwor_specpv import NworError
from nwor_specpv.transformers import Generator
from tests.python.transformers.tiny_models import tiny

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


@pytest.mark.parametrize("kind", ["book", "log", "code"])
def test_prompts_have_their_length_and_begin_differently(matrix: ModuleType, kind: str) -> None:
    prompts = matrix.make_prompts(Letters(), kind, 4, 300)
    assert [len(prompt) for prompt in prompts] == [300] * 4
    assert len({tuple(prompt[50:]) for prompt in prompts}) == 4


def test_a_cell_tells_rates_shares_and_tokens(matrix: ModuleType) -> None:
    speeds = {"none": [10.0, 20.0, 10.0], "ngram": [20.0, 30.0, 20.0], "other": [5.0, 10.0, 5.0]}
    calls: list[str] = []

    def way(name: str):
        def run(prompts: list, tokens: int) -> SimpleNamespace:
            calls.append(name)
            rate = speeds[name][calls.count(name) - 1]
            ids = [[1]] if name == "other" else [[2]]
            return SimpleNamespace(stats=SimpleNamespace(tokens_per_second=rate), token_ids=ids)

        return run

    told = matrix.run_cell({name: way(name) for name in speeds}, [[1]], 4, 3)
    assert told["rates"] == speeds
    assert told["of_plain"] == {"none": 1.0, "ngram": 2.0, "other": 0.5}
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
