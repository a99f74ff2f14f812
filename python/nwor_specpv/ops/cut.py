"""Where sequences end: stop tokens and lengths on the device, strings and grammars on the host.

What is cut is neither committed nor emitted: the path and the counts that come out of here are what
`commit` takes, and the emitted tokens are what a user sees.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from nwor_specpv.errors import NworError

from ._call import call
from .tree import describe_status

__all__ = ["FINISH_REASONS", "Cut", "GrammarCut", "StopStrings", "cut_on_host", "cut_path"]

FINISH_REASONS = ("", "stop", "length", "callback")

# (request, this round's tokens) -> how many of them to keep and end there, or None to go on. One
# with a method `settle(request, kept)` is told at the end how many were kept, later cuts included.
Callback = Callable[[int, list[int]], int | None]


class Cut(NamedTuple):
    """An accepted run up to where its sequence ends."""

    path: torch.Tensor  # [B, R] int32: rows to commit, -1 padded
    counts: torch.Tensor  # [B] int32
    next_token: torch.Tensor  # [B] int64: the last emitted token, -1 = nothing is emitted
    emitted: torch.Tensor  # [B, R] int64: this round's tokens, -1 padded
    num_emitted: torch.Tensor  # [B] int32
    finish: torch.Tensor  # [B] int32: index of FINISH_REASONS, 0 = the sequence goes on


def cut_path(
    tokens: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    next_token: torch.Tensor,
    *,
    stop_ids: torch.Tensor | None = None,
    max_new_tokens: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> Cut:
    """Ends accepted runs at the first stop token, after `max_new_tokens`, or after `keep` tokens.

    A run is the accepted drafts and `next_token`. The stop token itself is emitted. All emitted
    tokens but the last are committed. `stop_ids` [n] or [B, n] (negative = none): EOS and others;
    `max_new_tokens` [B]: how many may still be emitted; `keep` [B]: what a callback decided, -1 for
    no opinion. No host sync, capturable.
    """
    op = torch.ops.nwor_specpv.cut_path.default
    given = (tokens, path, counts, next_token, stop_ids, max_new_tokens, keep, status)
    return Cut(*call(op, *given))


def cut_on_host(
    tokens: torch.Tensor,
    path: torch.Tensor,
    counts: torch.Tensor,
    next_token: torch.Tensor,
    callback: Callback | Sequence[Callback],
    *,
    stop_ids: torch.Tensor | None = None,
    max_new_tokens: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> Cut:
    """`cut_path` with callbacks that see each request's tokens; the earliest cut counts.

    Waits for the device: strings and grammars are the host's. A later callback sees no more
    than what the ones before it kept. A request that emits nothing is not shown. A path outside the
    tree raises before any callback is asked; on CUDA with `status` that request emits nothing, and
    its word says why.
    """
    own = status
    if own is None:
        own = torch.zeros(tokens.shape[:1], dtype=torch.int64, device=tokens.device)
    rest = {"stop_ids": stop_ids, "max_new_tokens": max_new_tokens, "status": own}
    first = cut_path(tokens, path, counts, next_token, **rest)
    if status is None:
        _raise_faults(own)
    callbacks = [callback] if callable(callback) else list(callback)
    runs = zip(first.emitted.tolist(), first.num_emitted.tolist(), strict=True)
    keep = [
        _ask(callbacks, request, row[:length]) if length else -1
        for request, (row, length) in enumerate(runs)
    ]
    if all(decided < 0 for decided in keep):
        return first
    device = first.counts.device
    limit = torch.tensor(keep, dtype=torch.int32, device=device)
    return cut_path(tokens, path, counts, next_token, **rest, keep=limit)


def _raise_faults(status: torch.Tensor) -> None:
    for request, word in enumerate(status.tolist()):
        if word:
            raise NworError(f"request {request}: got {describe_status(word)}")


def _ask(callbacks: Sequence[Callback], request: int, run: list[int]) -> int:
    """How many tokens of a run all callbacks leave, -1 if none cuts."""
    decided = -1
    emitted = 0  # if one of them fails
    try:
        for one in callbacks:
            kept = one(request, list(run))
            if kept is None:
                continue
            number = _number(kept)
            if number is None or not 0 <= number <= len(run):
                raise NworError(
                    f"callback: got {kept} for request {request}, expected None or 0 .. {len(run)}"
                )
            run, decided = run[:number], number
        emitted = len(run)
    finally:
        for one in callbacks:
            settle = getattr(one, "settle", None)
            if settle is not None:
                settle(request, emitted)
    return decided


def _number(kept: Any) -> int | None:
    """None where it is no number; a bool says something else, though it is an integer too."""
    try:
        return None if isinstance(kept, bool) else operator.index(kept)
    except TypeError:
        return None


class StopStrings:
    """A callback that ends a sequence once its text holds one of `strings`.

    `decode` turns token ids into text. Keeps each request's tokens, since a string may span rounds;
    `text(request)` is what was emitted, up to the stop string; what a later callback cuts is not in
    it. `forget(request)` ends a request.
    """

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]):
        wrong = isinstance(strings, (str, bytes)) or not strings
        if wrong or not all(isinstance(one, str) and one for one in strings):
            raise NworError(f"strings: got {strings!r}, expected a list of strings, none empty")
        self._strings = tuple(strings)
        self._decode = decode
        self._tokens: dict[int, list[int]] = {}
        self._rounds: dict[int, int] = {}  # where the latest round's tokens begin

    def __call__(self, request: int, tokens: list[int]) -> int | None:
        history = self._tokens.setdefault(request, [])
        self._rounds[request] = len(history)
        for kept, token in enumerate(tokens, 1):
            history.append(token)
            if self._end(self._decode(history)) is not None:
                return kept
        return None

    def settle(self, request: int, kept: int) -> None:
        """Of the tokens that were shown last, `kept` are emitted."""
        if request in self._rounds:  # not forgotten meanwhile, by another callback
            del self._tokens[request][self._rounds[request] + kept :]

    def text(self, request: int) -> str:
        """What was emitted for the request, up to the stop string."""
        text = self._decode(self._tokens.get(request, []))
        return text[: self._end(text)]

    def forget(self, request: int) -> None:
        """The request has ended; its tokens go."""
        self._tokens.pop(request, None)
        self._rounds.pop(request, None)

    def _end(self, text: str) -> int | None:
        found = [text.find(string) for string in self._strings]
        return min((at for at in found if at >= 0), default=None)


class Matcher(Protocol):
    """What a grammar must be able to do; xgrammar's GrammarMatcher is one."""

    def accept_token(self, token_id: int) -> bool: ...


class GrammarCut:
    """A callback that ends a run before the first token its request's grammar refuses.

    A matcher keeps what it accepted, also what a later callback cuts: a grammar comes last.
    """

    def __init__(self, matchers: dict[int, Matcher] | Sequence[Matcher]):
        self._matchers = matchers if isinstance(matchers, dict) else dict(enumerate(matchers))

    def __call__(self, request: int, tokens: list[int]) -> int | None:
        matcher = self._matchers.get(request)
        if matcher is None:
            return None
        for kept, token in enumerate(tokens):
            if not matcher.accept_token(token):
                return kept
        return None
