"""Faults that everyday use finds: each gets one line, or just works."""

from __future__ import annotations

import copy
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from nwor_specpv import NworError
from nwor_specpv.cli import main as cli
from nwor_specpv.transformers import Generator, load_model, thread_hint
from nwor_specpv.transformers.rows import costs
from nwor_specpv.transformers.rows.chooser import SIZES
from tests.python.transformers.tiny_models import TREES, decode_plainly, tiny
from tests.python.transformers.tokenizers_made_here import words

# ---- numbers that are none -----------------------------------------------------------------------


@pytest.mark.parametrize("place", ["model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_weights_that_are_no_numbers_give_an_error(
    place: str, value: float, temperature: float
) -> None:
    model = copy.deepcopy(tiny())
    with torch.no_grad():
        model.get_parameter(place)[:] = value
    for tree in (TREES["chain"], TREES["tree"]):
        generator = Generator(model, drafter="ngram")
        with pytest.raises(NworError, match=r"logits.*: got NaN, .?infinity or no") as told:
            generator.generate([1, 2, 3, 1, 2, 3], 8, temperature, tree=tree)
        assert "\n" not in str(told.value)


def test_numbers_that_go_wrong_later_give_an_error_and_nothing_stays() -> None:
    """The prompt's pass is right, a later step is not."""
    model = copy.deepcopy(tiny())
    truth = decode_plainly(model, [1, 2, 3], 12)
    generator = Generator(model, drafter="none")
    heard: list[int] = []

    def spoil(token: int) -> None:
        heard.append(token)
        if len(heard) == 3:
            with torch.no_grad():
                model.lm_head.weight[:] = float("nan")

    with pytest.raises(NworError, match="logits: got NaN"):
        generator.generate([1, 2, 3], 12, on_token=spoil)
    assert heard == truth[:3]


# ---- options -------------------------------------------------------------------------------------


def test_options_of_sampling_without_a_temperature_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    generator = Generator(tiny(), drafter="none")
    for given in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.2}):
        caplog.clear()
        generator.generate([1, 2], 2, **given)
        ((name, value),) = given.items()
        assert [one.getMessage() for one in caplog.records] == [
            f"{name}={value}: has no effect at temperature 0, which is greedy; set a temperature "
            "above 0 to sample"
        ]
        caplog.clear()
        generator.generate([1, 2], 2, 0.5, **given)
        assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("do_sample", "a temperature above 0 samples, 0 is greedy"),
        ("max_length", "use max_new_tokens"),
        ("num_beams", "there is no beam search"),
        ("generation_config", "give its values as arguments"),
        ("stopping_criteria", "use stop"),
        ("assistant_model", "drafter='draft_model'"),
        ("no_repeat_ngram_size", r"use logits_processor=\[NoRepeatNGramLogitsProcessor\(...\)\]"),
        ("repitition_penalty", "the nearest is repetition_penalty"),
        ("zzz", "docs/generate_options.md lists the options"),
    ],
)
def test_options_of_transformers_name_our_way(name: str, way: str) -> None:
    generator = Generator(tiny(), drafter="none")
    with pytest.raises(NworError, match=f"{name}: not an option of Generator.generate; .*{way}"):
        generator.generate([1, 2], 4, **{name: 1})


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"input_ids": [1, 2]}, "max_new_tokens: got none, expected the most new tokens"),
        ({"input_ids": [1, 2], "max_length": 9}, "max_length: .*; use max_new_tokens"),
        ({"inputs": [1, 2], "max_new_tokens": 9}, "inputs: .*; call it input_ids"),
        ({"max_new_tokens": 9}, "input_ids: got NoneType, expected token ids"),
        ({"inputs_embeds": torch.zeros(1, 2, 3), "max_new_tokens": 9}, "give input_ids"),
    ],
)
def test_what_is_missing_is_named_beside_options_of_transformers(
    options: dict[str, Any], line: str
) -> None:
    with pytest.raises(NworError, match=line):
        Generator(tiny(), drafter="none").generate(**options)


# ---- prompts -------------------------------------------------------------------------------------


def test_a_tokenizers_whole_output_is_a_prompt() -> None:
    model, tokenizer = tiny(), words()
    generator = Generator(model, tokenizer, "none")
    one, several = "w5;w6;w7;", ["w5;w6;w7;", "w9;w8;"]
    truths = [decode_plainly(model, ids, 6) for ids in ([5, 6, 7], [9, 8])]
    for given in (tokenizer(one), tokenizer(one, return_tensors="pt"), dict(tokenizer(one))):
        assert generator.generate(given, 6).token_ids == truths[0]
    for side in ("left", "right"):
        tokenizer.padding_side = side
        padded = tokenizer(several, padding=True, return_tensors="pt")
        assert isinstance(padded, BatchEncoding)
        assert generator.generate(padded, 6).token_ids == truths
        assert generator.generate(**padded, max_new_tokens=6).token_ids == truths
        mask = padded["attention_mask"].bool()
        told = generator.generate(padded["input_ids"], 6, attention_mask=mask)
        assert told.token_ids == truths


@pytest.mark.parametrize(
    ("given", "mask", "message"),
    [
        ({"ids": [1]}, None, "input_ids: got a mapping with ids, expected input_ids in it"),
        ({}, None, "input_ids: got a mapping with nothing, expected input_ids"),
        ([1, 2, 3], [1, 0, 1], "attention_mask: got tokens hidden inside prompt 0"),
        (
            [1, 2, 3],
            [1, 1],
            r"attention_mask: got rows of \[2\], expected the lengths of input_ids",
        ),
        ([[1, 2], [3, 4]], [[0, 0], [1, 1]], "input_ids: prompt 0 is empty"),
        ([{"role": "user", "content": "w1"}], None, "input_ids: got messages of a chat and a tok"),
        ([{"role": "user"}, 3], None, "input_ids: got"),
        ("text", None, "input_ids: got text, expected token ids: tokenizer"),
    ],
)
def test_prompts_that_are_none_are_named(given: Any, mask: Any, message: str) -> None:
    generator = Generator(tiny(), words(), "none")
    with pytest.raises(NworError, match=message) as told:
        generator.generate(given, 4, attention_mask=mask)
    assert "\n" not in str(told.value)


def test_names_of_the_hub_say_how_to_download() -> None:
    line = (
        "model: got 'Qwen/Qwen2.5-0.5B', expected the folder of a model; a model of the Hugging "
        "Face Hub is downloaded first: hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B"
    )
    with pytest.raises(NworError) as told:
        load_model("Qwen/Qwen2.5-0.5B")
    assert str(told.value) == line
    with pytest.raises(NworError) as told:
        load_model("/no/such/folder")
    assert "hf download" not in str(told.value)


def test_the_command_line_reads_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny().save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)

    def run(text: bytes, *more: str) -> dict:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        line = ["generate", "--model", str(tmp_path), "--json", "--max-new-tokens", "5", *more]
        assert cli.main(line) == 0
        return json.loads(capsys.readouterr().out)

    told = [run(b"w5;w6;w7;", "--file", "-"), run(b"", "--prompt", "w5;w6;w7;")]
    assert told[0]["token_ids"] == told[1]["token_ids"] == decode_plainly(tiny(), [5, 6, 7], 5)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert cli.main(["generate", "--model", str(tmp_path), "--file", "-"]) == 2
    assert "--file: got '-', which cannot be read" in capsys.readouterr().err


# ---- threads and costs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "cores", "load", "environment", "told"),
    [
        (2, 2, 5.0, {}, True),
        (2, 2, 5.0, {"OMP_WAIT_POLICY": "PASSIVE"}, False),
        (2, 2, 5.0, {"GOMP_SPINCOUNT": "0"}, False),
        (2, 2, 1.9, {}, False),
        (1, 2, 5.0, {}, False),
    ],
)
def test_a_hint_where_threads_spin(
    threads: int, cores: int, load: float, environment: dict, told: bool
) -> None:
    hint = thread_hint.spinning_hint(threads, cores, load, environment)
    assert (hint is not None) == told
    if hint is not None:
        assert "OMP_WAIT_POLICY=passive" in hint


def test_the_hint_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thread_hint, "_told", False)
    monkeypatch.setattr(thread_hint, "spinning_hint", lambda *_: "threads: spin")
    generator = Generator(tiny(), drafter="none")
    with caplog.at_level(logging.WARNING):
        generator.generate([1, 2], 2)
        generator.generate([1, 2], 2)
    assert [one.getMessage() for one in caplog.records] == ["threads: spin"]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every measurement is kept; the list grows with each."""
    measured: list[int] = []
    measure = costs.measure
    monkeypatch.setattr(costs, "_WORTH_KEEPING", 0.0)
    monkeypatch.setattr(costs, "measure", lambda runner: measured.append(1) or measure(runner))
    return measured


def test_costs_are_kept_between_processes_by_model_and_threads(
    kept: list[int], costs_folder: Path
) -> None:
    first = Generator(tiny(), drafter="none").row_costs
    assert Generator(tiny(seed=1), drafter="none").row_costs == first
    assert len(kept) == 1
    assert list(costs_folder.iterdir())
    _ = Generator(tiny("qwen2"), drafter="none").row_costs
    assert len(kept) == 2
    _ = Generator(tiny(num_hidden_layers=2), drafter="none").row_costs
    assert len(kept) == 3
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        _ = Generator(tiny(), drafter="none").row_costs
    finally:
        torch.set_num_threads(before)
    assert len(kept) == 4


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\x00",
        b"[]",
        b'{"seconds": 3}',
        b'{"seconds": {"1": 1.0}}',
        json.dumps({"seconds": dict.fromkeys(map(str, SIZES), -1.0)}).encode(),
        json.dumps({"seconds": dict.fromkeys(map(str, SIZES), float("nan"))}).encode(),
        json.dumps({"seconds": dict.fromkeys(map(str, SIZES), "x")}).encode(),
    ],
)
def test_a_damaged_file_of_costs_is_measured_and_written_again(
    kept: list[int], costs_folder: Path, damage: bytes
) -> None:
    _ = Generator(tiny(), drafter="none").row_costs
    (place,) = costs_folder.iterdir()
    place.write_bytes(damage)
    again = Generator(tiny(), drafter="none").row_costs
    assert len(kept) == 2
    assert Generator(tiny(), drafter="none").row_costs == again
    assert len(kept) == 2


def test_a_folder_that_cannot_be_written_costs_a_measurement(
    kept: list[int], costs_folder: Path
) -> None:
    costs_folder.parent.write_text("a file where the folder would be")
    for count in (1, 2):
        assert Generator(tiny(), drafter="none").row_costs[1] > 0
        assert len(kept) == count
