"""Text as it is generated: pieces of whole characters, an iterator of them, other streamers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nwor_specpv import NworError

from .stopping import cut_text

_CONTEXT = 16  # tokens before the new ones, which decide about spaces


class TextPieces:
    """Turns tokens into text; a character of several tokens is given once it is whole.

    What may be the beginning of a stop string waits; from a stop string on there is no text.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._context: list[int] = []
        self._new: list[int] = []
        self._held = ""
        self._ended = False

    def add(self, token: int) -> str:
        """The text that is known now."""
        self._new.append(token)
        text = self._decode(self._context + self._new)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._give(text)

    def end(self) -> str:
        """The rest, when no token follows."""
        piece = self._give(self._decode(self._context + self._new)) + self._held
        self._held, self._ended = "", True
        return piece

    def _give(self, text: str) -> str:
        self._held += text[len(self._decode(self._context)) :]
        self._context = (self._context + self._new)[-_CONTEXT:]
        self._new = []
        if self._ended:
            self._held = ""
            return ""
        kept = cut_text(self._held, self._stop)
        if kept != self._held:
            self._held, self._ended = "", True
            return kept
        whole = len(kept) - max((_overlap(kept, one) for one in self._stop), default=0)
        self._held = kept[whole:]
        return kept[:whole]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)


class _ClosedError(Exception):
    """Ends a call whose stream was closed."""


class TextStream(Iterator[str]):
    """Pieces of a text while it is generated, in a thread of its own.

    `generation` is the whole result once the pieces are at their end. `close()` ends the call
    early, and so does leaving `with generator.stream(...) as pieces:`.
    """

    def __init__(self, generate: Callable[..., Any], pieces: TextPieces) -> None:
        self.generation: Any = None
        self._pieces = pieces
        self._told: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(generate,), daemon=True)
        self._thread.start()

    def _run(self, generate: Callable[..., Any]) -> None:
        try:
            self.generation = generate(on_token=self._hear)
            self._told.put(self._pieces.end())
            self._told.put(None)
        except BaseException as error:  # the reader raises it
            self._told.put(error)

    def _hear(self, token: int) -> None:
        if self._closed.is_set():
            raise _ClosedError
        piece = self._pieces.add(token)
        if piece:
            self._told.put(piece)

    def __next__(self) -> str:
        while not self._closed.is_set():
            told = self._told.get()
            if isinstance(told, str):
                if told:
                    return told
                continue
            self.close()
            if isinstance(told, BaseException):
                raise told
        raise StopIteration

    def __enter__(self) -> TextStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the call, after its current step."""
        self._closed.set()
        self._thread.join()


class Streamer:
    """Feeds a streamer of transformers, such as TextStreamer, with one sequence."""

    def __init__(self, streamer: Any) -> None:
        if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
            raise NworError(
                f"streamer: got {type(streamer).__name__}, expected a streamer of transformers, "
                "with put and end"
            )
        self._streamer = streamer

    def begin(self, prompts: list[list[int]]) -> None:
        if len(prompts) != 1:
            raise NworError(
                f"streamer: got {len(prompts)} sequences, expected one; on_token(token, request) "
                "tells the tokens of several"
            )
        self._streamer.put(torch.tensor(prompts))

    def put(self, tokens: list[int]) -> None:
        for token in tokens:
            self._streamer.put(torch.tensor([token]))

    def end(self) -> None:
        self._streamer.end()
