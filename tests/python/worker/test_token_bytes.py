"""Token bytes join to the text's UTF-8, also inside a character."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nwor_specpv.worker.token_bytes import token_bytes_of
from tests.python.worker.serving import PLAIN, PROMPT, serving

TEXT = "naïve café, 東京 \N{GRINNING FACE}\tsoon \x00 end"


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer of its own, of at most 300 tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(["some words and some more words"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def test_bytes_of_a_byte_level_tokenizer_join_to_the_text() -> None:
    tokenizer = byte_level()
    token_bytes = token_bytes_of(tokenizer)
    ids = tokenizer(TEXT).input_ids
    assert b"".join(map(token_bytes, ids)) == TEXT.encode()
    assert len(ids) > len(TEXT)  # characters of several tokens
    assert token_bytes(tokenizer.eos_token_id) == b"<|end|>"
    assert token_bytes(10**6) == b""


def test_bytes_of_byte_pieces_join_to_the_text() -> None:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"aecfnv", "\u2581c"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    model = models.BPE(vocabulary, [("\u2581", "c")], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    token_bytes = token_bytes_of(wrapped)
    ids = wrapped(TEXT).input_ids
    assert vocabulary["\u2581c"] in ids
    assert b"".join(map(token_bytes, ids)) == TEXT.encode()


@pytest.mark.parametrize("tokenizer", [None, object()])
def test_what_has_no_bytes_gives_none(tokenizer: object) -> None:
    assert token_bytes_of(tokenizer) is None


def test_a_tokenizer_of_words_has_no_bytes() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    assert token_bytes_of(PreTrainedTokenizerFast(tokenizer_object=words)) is None


def test_an_answer_has_the_bytes_that_were_asked_for() -> None:
    options = {"token_bytes": lambda token: b"<%d>" % token}
    with serving(server_options=options) as worker:
        assert worker.client.ping().has_token_bytes
        session = worker.client.session("a")
        result = session.verify(None, PROMPT, token_bytes=True)
        follow = PLAIN[len(PROMPT)]
        assert result.token_bytes == [b"<%d>" % follow]
        assert session.verify(None, [follow]).token_bytes == []
