"""A training that was broken off goes on; its card says what it has reached."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from nwor_specpv import NworError
from nwor_specpv.drafters.eagle3_head import Eagle3Head
from nwor_specpv.train import acceptance, eagle3
from nwor_specpv.train.plan import TrainingPlan
from nwor_specpv.train.progress import read_progress
from tests.python.train.test_other_targets import HEADERS, make_tokenizer, write_template

STEPS = 4  # updates of a whole run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen2 with a tokenizer and a chat template of its own."""
    made = tmp_path_factory.mktemp("models") / "small-qwen2"
    write_template(made, HEADERS)
    make_tokenizer(made)
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=48, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=2, max_position_embeddings=4096,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(made)
    return made


def command(folder: Path, out: Path, *more: str) -> list[str]:
    prompts = out.parent / "prompts.json"
    if not prompts.is_file():
        chat = {"kind": "chat", "tokens": [3, 9, 4], "invented": [2, 4], "answer": [2, 3, 4]}
        kept = {"kind": "chat", "tokens": [3, 9, 4], "invented": [0, 0], "answer": []}
        data = {"openings": [chat] * 4, "held_out": [kept] * 2, "stop_tokens": [1, 2]}
        prompts.write_text(json.dumps(data))
    return [
        f"--target={folder}", f"--out={out}", f"--prompts={prompts}", "--device=cpu", "--rows=2",
        "--length=64", "--tokens=128", "--batch-tokens=64", "--steps=2", "--early-steps=2",
        "--intermediate=16", "--window=16", "--draft-vocabulary=20", "--cycles=2",
        "--measure-tokens=12", f"--updates={STEPS}", "--optimizer=adamw", "--minutes=30",
        "--measure-seconds=1e-9", *more,
    ]  # fmt: skip


class StoppedError(Exception):
    pass


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The process ends in the update after `count` of them."""
    done, update = [], eagle3.Training._update

    def counted(self: eagle3.Training, *given: Any) -> None:
        if len(done) == count:
            raise StoppedError
        done.append(1)
        update(self, *given)

    monkeypatch.setattr(eagle3.Training, "_update", counted)


def test_a_run_goes_on_from_its_latest_measurement(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "head"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(StoppedError):
            eagle3.main(command(folder, out, "--resume"))  # nothing is there: it begins
    left = json.loads((out / "training.json").read_text())
    assert left["progress"]["ended"] is False
    done = left["measured"][-1]["updates"]
    assert 1 <= done <= 3
    vocabulary = Eagle3Head.load(out / "eagle3.safetensors").draft_to_target
    assert eagle3.main(command(folder, out, "--resume")) == 0
    record = json.loads((out / "training.json").read_text())
    assert record["progress"]["ended"] is True
    assert record["measured"][: len(left["measured"])] == left["measured"]
    assert record["measured"][-1]["updates"] == STEPS
    assert record["measured"][-1]["seconds"] >= left["measured"][-1]["seconds"]
    head = Eagle3Head.load(out / "eagle3.safetensors")
    assert torch.equal(head.draft_to_target, vocabulary)
    before = (out / "eagle3.safetensors").read_bytes()
    capsys.readouterr()
    assert eagle3.main(command(folder, out, "--resume")) == 0
    assert "has had its 30 minutes" in capsys.readouterr().out
    assert (out / "eagle3.safetensors").read_bytes() == before


def test_what_cannot_go_on_is_named(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "head"
    assert eagle3.main(command(folder, out)) == 0
    plan = TrainingPlan(length=64)
    assert read_progress(tmp_path, plan).head is None
    for more, line in (
        (["--learning-rate=0.5"], "resume: got learning_rate 0.5, expected 0.005, as in the run"),
        (["--length=32"], "resume: got length 32, expected 64"),
    ):
        capsys.readouterr()
        assert eagle3.main(command(folder, out, "--resume", *more)) == 2
        assert line in capsys.readouterr().err
    for damage in ("", "[]", '{"plan": {}, "measured": []}'):
        (out / "training.json").write_text(damage)
        with pytest.raises(NworError, match="no record that a run can go on from"):
            read_progress(out, plan)
    assert eagle3.main(command(folder, out, "--length=8192")) == 2
    assert "length: got 8192, expected at most 4096" in capsys.readouterr().err


def test_the_card_says_what_was_reached(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    assert eagle3.main(command(folder, out, "--answer-tokens=40")) == 0
    record, card = (
        json.loads((out / "training.json").read_text()),
        (out / "eagle3.md").read_text(),
    )
    assert card.startswith("# EAGLE3 head for small-qwen2\n")
    assert "| target | small-qwen2, 4 layers |" in card
    assert "outputs of layers 1, 2, counted from 0" in card
    assert "in rows of 64; answers of at most 40 to 40 tokens" in card
    assert f"| training | {STEPS:,} updates of 64 tokens, {64 * STEPS:,} in all; adamw" in card
    assert "| state | ended |" in card
    found = record["measured"][-1]["held_out"]["chat"]
    hits = " | ".join(f"{hit:.2f}" for hit in found["top1_by_depth"])
    steps = f"{found['chain_4']:.2f} | {found['widths_4321']:.2f}"
    assert f"| chat | {steps} | {hits} |" in card
    rows = re.findall(r"^\|.*\|$", card.partition("On held-out")[2], re.M)
    assert len({row.count("|") for row in rows}) == 1


def test_acceptance_is_measured_for_any_target(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "head"
    assert eagle3.main(command(folder, out)) == 0
    capsys.readouterr()
    given = [
        f"--weights={out / 'eagle3.safetensors'}", f"--target={folder}", "--invented=1",
        "--prompts=1", "--answer-tokens=4",
    ]  # fmt: skip
    assert acceptance.main(given) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["target"] == "small-qwen2"
    assert set(told["answers of 4 tokens"]["eagle3"]["chain of 4"]) == set(told["texts"])
