"""benchmarks/vllm/real.py runs from end to end with a tiny model; its figures are not looked at."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nwor_specpv.cli.demo.texts import BOOK
from nwor_specpv.models import stories
from nwor_specpv.vllm.specpv.rules import DRAFTER
from support.engines import release_engines
from support.installed import PAGE, VERSION
from support.small_views import SMALL_VIEW

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "vllm"
CELL = {"requests": 2, "context": 320, "prompt": "continue", "temperature": 0.0}
SIZE = ("--cells", "2x320", "--prompts", "continue", "--temperatures", "0", "--tokens", "24")
SIZE += ("--warm-tokens", "4")
# On CPUs the drafter is one of vLLM's model runner V1.
SPECULATION = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The story model with a tokenizer that transformers reads."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(stories(), folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([BOOK.read_text()], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    return folder


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    yield importlib.import_module("real")
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == FOLDER:
            del sys.modules[name]


def in_this_process(real: ModuleType, started: list[str]) -> Callable[..., Any]:
    """Takes the place of `launch`: an engine starts faster where vLLM is imported."""

    def run(command: list[str], *_: Any) -> Any:
        started.append(command[command.index("--child") + 1])
        code = real.main(command[2:])
        release_engines()
        return SimpleNamespace(wait=lambda timeout=0: code, poll=lambda: code)

    return run


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_sides_of_one_cell(
    real: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[str] = []
    monkeypatch.setattr(real, "launch", in_this_process(real, started))
    settings = SMALL_VIEW | {"specpv_draft_passes": 2}
    engine = {"lossless": {"speculative_config": SPECULATION, "block_size": PAGE}}
    arguments = ["--model", str(model), "--out", str(tmp_path), "--sides", "plain", "lossless"]
    arguments += [*SIZE, "--dtype", "float32", "--turns", "2"]
    arguments += ["--set", json.dumps(settings), "--engine", json.dumps(engine)]
    assert real.main(arguments) == 0
    assert started == ["plain", "lossless"] * 2
    found = read(tmp_path)
    assert [r["engine"] for r in found if "engine" in r] == started
    jobs = [r for r in found if "status" in r]
    assert [(r["side"], r["turn"]) for r in jobs] == [
        ("plain", 0), ("plain", -1), ("lossless", 0), ("plain", 1), ("lossless", 1)
    ]  # fmt: skip
    for record in jobs:
        assert record.items() >= (CELL | {"status": "measured", "stopped": ""}).items()
        assert record["tokens_per_s"] > 0
        assert all(24 <= len(tokens) <= 28 for tokens in record["outputs"])
        assert (len(record["outputs"]), record["cached"]) == (2, 0)
        for name in ("step_ms", "first_token_s", "output_gap_ms", "token_ms"):
            assert 0 < record[name]["p50"] <= record[name]["p99"]
    plain, reference, ours = jobs[:3]
    assert plain["tokens_per_step"] == 1
    assert (plain["steps"], plain["drafted"]) == (24, 0)
    assert [len(entries) for entries in reference["second_best"]] == [28, 28]
    assert all(gap >= 0 for entries in reference["second_best"] for _, gap in entries)
    assert 0 < ours["passes_per_step"] <= 2
    assert 0 < ours["accepted"] <= ours["drafted"]
    assert ours["draft_failures"] == {}
    assert ours["tokens_per_step"] > 1

    assert real.main(arguments) == 0  # goes on where it was: nothing is left
    assert len(started) == 4
    lines = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "records.jsonl").write_text("".join(lines[:-1]))
    assert real.main(arguments) == 0
    assert started[4:] == ["lossless"]

    result = tmp_path / "real_tiny.json"
    assert real.main(["--out", str(tmp_path), "--summary", str(result), "--revision", "abc"]) == 0
    told = json.loads(result.read_text())
    assert told.items() >= {"model": "tiny", "revision": "abc", "vllm": VERSION}.items()
    (cell,) = told["cells"]
    assert cell["sides"]["lossless"]["speed"] > 0
    assert [run["equal"] for run in cell["sides"]["lossless"]["greedy"]] == [2, 2]
    assert "| continue | 0 | 2 x 320 |" in (tmp_path / "table.md").read_text()


@pytest.mark.slow
def test_an_engine_that_does_not_start_is_left_out(
    real: ModuleType, model: Path, tmp_path: Path
) -> None:
    """In processes of their own, up at once, stock sides without the plugin. Prompts come once."""
    engine = {"ngram": {"speculative_config": {"method": "none such"}}, "all": {"block_size": PAGE}}
    arguments = ["--model", str(model), "--out", str(tmp_path), "--sides", "ngram", "plain"]
    arguments += [*SIZE, "--dtype", "float32", "--turns", "1", "--engine", json.dumps(engine)]
    arguments += ["--share-prompts", "--together"]
    assert real.main(arguments) == 0
    found = {(r["side"], r["turn"]): r for r in read(tmp_path) if "status" in r}
    assert {key: record["status"] for key, record in found.items()} == {
        ("ngram", 0): "failed", ("plain", 0): "measured", ("plain", -1): "measured"
    }  # fmt: skip
    assert found["ngram", 0]["reason"].startswith("the engine did not start: ValidationError")
    first, again = (found["plain", turn] for turn in (0, -1))
    assert (first["cached"], again["first_token_s"]) == (0, {})
    assert first["first_token_s"]["p50"] > 0
    assert again["cached"] > 0.8
    assert "none such" in (tmp_path / "ngram.log").read_text()
    assert "nwor_specpv" not in (tmp_path / "plain.log").read_text()
