"""The story model is real, three ways of decoding with it agree, and the contract is kept."""

from __future__ import annotations

import pytest
import torch

from nwor_specpv.models.tiny_model import TinyModel, TinyTokenizer
from tests.python.models.tiny_decoding import (
    NgramTree,
    SpeculativeDecoder,
    decode_plain,
    draft_by_ngrams,
)


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


def test_tokenizer_round_trip() -> None:
    tokenizer = TinyTokenizer()
    assert len(tokenizer.pieces) == 512
    text = 'Lily said, "Hello!" Ünïcode and tabs\t too.\n'
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_model_tells_the_story_it_was_trained_on(model: TinyModel) -> None:
    tokenizer = TinyTokenizer()
    run = decode_plain(model, tokenizer.encode("Once upon a time"), 12)
    assert tokenizer.decode(run.tokens).startswith(", there was a little girl named")


def test_ngrams_draft_what_followed_before() -> None:
    history = [1, 5, 6, 7, 8, 9, 5, 6]
    assert draft_by_ngrams(history, 3, 1) == NgramTree([7, 8, 9], [0, 1, 2])
    tree = draft_by_ngrams([5, 6, 7, 8, 5, 6, 7, 9, 5, 6], 2, 2)
    # Both matches begin with 7, which is one row; 9 (the newer) and 8 hang on it.
    assert tree == NgramTree([7, 9, 8], [0, 1, 1])
    assert draft_by_ngrams([1, 2, 3], 4, 2) == NgramTree()


@pytest.mark.parametrize(("length", "branches"), [(7, 1), (4, 3)])
@pytest.mark.parametrize("text", ["", "Tom and Sam. Tom and Sam. Tom and"])
def test_speculation_gives_the_tokens_of_plain_decoding(
    model: TinyModel, text: str, length: int, branches: int
) -> None:
    prompt = TinyTokenizer().encode(text)
    with torch.inference_mode():
        plain = decode_plain(model, prompt, 60)
        run = SpeculativeDecoder(model).decode(prompt, 60, length, branches)
    assert run.tokens == plain.tokens
    assert run.violations == []
    stats = run.stats
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"]
    assert stats["committed_tokens"] > 0
    assert run.steps < plain.steps
