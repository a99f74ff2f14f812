"""Text while it is generated: an iterator of pieces, and streamers of transformers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from transformers import TextIteratorStreamer, TextStreamer

from nwor_specpv import NworError
from nwor_specpv.transformers import Generator
from nwor_specpv.transformers.calls.streaming import TextPieces
from tests.python.specpv.contexts import seeded
from tests.python.transformers.tiny_models import decode_plainly, random_prompt, tiny
from tests.python.transformers.tokenizers_made_here import words


class Bytes:
    """A tokenizer of bytes, so that characters have several tokens."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", "replace")


def pieces_of(text: str, *stop: str) -> list[str]:
    pieces = TextPieces(Bytes(), stop)
    told = [pieces.add(token) for token in text.encode()]
    return [*told, pieces.end()]


@pytest.mark.parametrize("text", ["", "plain", "äöü and €, \N{GRINNING FACE}!", "x" * 100 + "é"])
def test_pieces_are_whole_characters_and_together_the_text(text: str) -> None:
    told = pieces_of(text)
    assert "".join(told) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in told)


def test_a_text_that_ends_inside_a_character_is_told_to_its_end() -> None:
    pieces = TextPieces(Bytes())
    told = [pieces.add(token) for token in "a€".encode()[:-1]]
    assert "".join([*told, pieces.end()]) == "a\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), "one "),
        ("one EN two", ("END",), "one EN two"),
        ("one EEND", ("END",), "one E"),
        ("one E", ("END",), "one E"),
        ("abab", ("abc", "bab"), "a"),
        ("ENDEND", ("END",), ""),
    ],
)
def test_nothing_of_a_stop_string_is_told(text: str, stop: tuple[str, ...], expected: str) -> None:
    assert "".join(pieces_of(text, *stop)) == expected


def make(count: int = 24) -> tuple[Generator, Any, list[int], list[int]]:
    rng, truth = seeded(), [0]
    while 0 in truth:  # which pads, and is no text
        prompt = random_prompt(rng)
        truth = decode_plainly(tiny(), prompt, count)
    tokenizer = words(chat=True)
    return Generator(tiny(), tokenizer, "ngram"), tokenizer, prompt, truth


def test_a_stream_tells_the_text_and_then_the_generation() -> None:
    generator, tokenizer, prompt, truth = make()
    stream = generator.stream(prompt, 24)
    told = list(stream)
    assert len(told) > 3
    assert "".join(told) == tokenizer.decode(truth)
    assert stream.generation.token_ids == truth
    assert list(stream) == []
    string = tokenizer.decode(truth[4:6])
    stopped = generator.stream(prompt, 24, stop=string)
    assert "".join(stopped) == stopped.generation.text
    assert string not in stopped.generation.text
    chat = [{"role": "user", "content": "w5;"}]
    assert "".join(generator.stream(chat, 5)) == generator.generate(chat, 5).text
    encoded = tokenizer(["w5;w6;"], return_tensors="pt")
    assert "".join(generator.stream(encoded, 5)) == generator.generate([5, 6], 5).text


def test_a_stream_that_is_left_ends_its_call_and_leaves_nothing() -> None:
    generator, _, prompt, truth = make()
    threads = threading.active_count()
    with generator.stream(prompt, 400) as stream:
        assert next(stream)
    assert stream.generation is None
    assert threading.active_count() == threads
    assert generator.generate(prompt, 24).token_ids == truth


def test_calls_in_the_meantime_wait_for_the_stream() -> None:
    generator, tokenizer, prompt, truth = make()
    stream = generator.stream(prompt, 24)
    assert generator.generate(prompt, 24).token_ids == truth
    assert "".join(stream) == tokenizer.decode(truth)


def test_what_a_stream_cannot_do_is_named() -> None:
    generator, _, prompt, _ = make()
    with pytest.raises(NworError, match="stream: got 2 sequences, expected one"):
        generator.stream([prompt, prompt], 4)
    with pytest.raises(NworError, match="on_token: cannot be given to stream"):
        generator.stream(prompt, 4, on_token=print)
    with pytest.raises(NworError, match="stream: got no tokenizer"):
        Generator(tiny(), drafter="none").stream(prompt, 4)
    with pytest.raises(NworError, match=r"max_length: .*; use max_new_tokens"):
        list(generator.stream(prompt, max_length=9))
    with pytest.raises(NworError, match="temperature: got -1"):
        list(generator.stream(prompt, 4, temperature=-1))


def test_streamers_of_transformers_hear_what_transformers_tells_them() -> None:
    generator, tokenizer, prompt, truth = make()

    class Heard(TextStreamer):
        def __init__(self) -> None:
            super().__init__(tokenizer)
            self.text, self.calls = "", []

        def put(self, value: torch.Tensor) -> None:
            self.calls.append(value.tolist())
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.text += text

    ours, theirs = Heard(), Heard()
    generator.generate(prompt, 24, streamer=ours)
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    tiny().generate(ids, attention_mask=mask, max_new_tokens=24, streamer=theirs, do_sample=False)
    assert ours.calls == theirs.calls == [[prompt], *([token] for token in truth)]
    assert ours.text == theirs.text
    iterator = TextIteratorStreamer(tokenizer, skip_prompt=True)
    generator.generate(prompt, 24, streamer=iterator)
    assert "".join(iterator) == tokenizer.decode(truth)
    with pytest.raises(NworError, match="streamer: got 2 sequences, expected one"):
        generator.generate([prompt, prompt], 4, streamer=ours)
