"""What a model's generation_config asks for and Generator does not do is told, once."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from nwor_specpv.bench.generate import ours, theirs
from nwor_specpv.transformers import Generator
from tests.python.transformers.tiny_models import tiny

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
ASKED: dict[str, Any] = {
    "repetition_penalty": 1.5,
    "encoder_repetition_penalty": 0.5,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[7]],
    "sequence_bias": [[[7], -9.0]],
    "suppress_tokens": [7, 8],
    "begin_suppress_tokens": [7],
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 3,
    "min_length": 12,
    "min_new_tokens": 4,
    "num_beams": 2,
    "guidance_scale": 1.5,
    "stop_strings": ["end"],
    "max_time": 1e-9,
}


def model_that_asks(**fields: Any) -> Any:
    model = copy.deepcopy(tiny())
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.parametrize("name", ASKED)
def test_what_is_not_done_is_told_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="nwor_specpv"):
        first = Generator(model_that_asks(**{name: ASKED[name]}), drafter="none")
        Generator(drafter="ngram", cache_of=first).generate(PROMPT, 2)
        first.generate(PROMPT, 2)
    (record,) = caplog.records
    assert record.name == "nwor_specpv"
    assert f"{name}={ASKED[name]!r}" in record.getMessage()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "num_beams": 1},
        {"suppress_tokens": [], "guidance_scale": 1, "encoder_repetition_penalty": 1},
        {"eos_token_id": 3, "pad_token_id": 4, "bos_token_id": 5, "max_new_tokens": 7},
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ],
)
def test_what_changes_no_greedy_token_is_not(
    fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", logger="nwor_specpv"):
        Generator(model_that_asks(**fields), drafter="none")
    assert caplog.records == []


def test_long_values_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="nwor_specpv"):
        Generator(model_that_asks(suppress_tokens=list(range(90))), drafter="none")
    assert "suppress_tokens=[0, 1, 2" in caplog.text
    assert len(caplog.records[0].getMessage()) < 200


@pytest.mark.parametrize(
    "name",
    [
        "repetition_penalty",
        "encoder_repetition_penalty",
        "bad_words_ids",
        "sequence_bias",
        "suppress_tokens",
        "min_length",
        "min_new_tokens",
        "num_beams",
        "guidance_scale",
        "stop_strings",
        "max_time",
    ],
)
def test_the_benchmark_compares_like_with_like(name: str) -> None:
    """transformers decodes greedily there, whatever the model asks for."""
    plain = Generator(tiny(), drafter="none").generate(PROMPT, 12, eos_token_id=-1).token_ids
    model = model_that_asks(**{name: ASKED[name]}, eos_token_id=plain[2])
    expected = ours(Generator(model, drafter="none"), whole=True)(PROMPT, 12)[0]
    assert expected == plain[:3]
    assert theirs(model)(PROMPT, 12)[0] == expected
    assert getattr(model.generation_config, name) == ASKED[name]
