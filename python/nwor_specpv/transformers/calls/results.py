"""What a call of generate gives, and tells while it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nwor_specpv.transformers.request import Request
from nwor_specpv.transformers.stats import Stats

from .options import Options
from .stopping import cut_text

_PROGRESS_FROM = 1024  # tokens of a prompt from which on a bar is shown


@dataclass
class Generation:
    """Of one prompt, or lists of them for a list of prompts."""

    token_ids: list[int] | list[list[int]]  # new tokens, the stop token included
    text: str | list[str] | None  # None without a tokenizer
    stats: Stats
    finish: str | list[str] = ""  # "stop" or "length"
    depths: list[int] | list[list[int]] = field(default_factory=list)  # 0: the target's own token
    # Of every new token by the model's own logits, if asked for.
    logprobs: list[float] | list[list[float]] | None = None


def collect(
    requests: list[Request],
    stats: Stats,
    tokenizer: Any,
    strings: tuple[str, ...],
    options: Options,
    *,
    is_list: bool,
) -> Generation:
    """`strings`: those that end a text and are not part of it."""
    found: list[list[Any] | None] = [
        [request.new_tokens for request in requests],
        None,
        [request.finish or "" for request in requests],
        [request.depths for request in requests],
        [request.logprobs for request in requests] if options.logprobs else None,
    ]
    if tokenizer is not None:
        whole = [tokenizer.decode(ids, skip_special_tokens=True) for ids in found[0]]
        found[1] = [cut_text(text, strings) for text in whole]
    if not is_list:
        found = [None if several is None else several[0] for several in found]
    token_ids, text, finish, depths, logprobs = found
    return Generation(token_ids, text, stats, finish, depths, logprobs)


def teller(options: Options, *, is_list: bool) -> Callable[[Request, list[int]], None]:
    """Hands new tokens to whoever wants to hear them."""
    on_token, streamer = options.on_token, options.streamer

    def tell(request: Request, tokens: list[int]) -> None:
        if streamer is not None:
            streamer.put(tokens)
        if on_token is not None:
            for token in tokens:
                on_token(token, request.index) if is_list else on_token(token)

    return tell


def show_progress(done: int, total: int) -> None:
    """A progress bar on stderr for long prompts, if stderr is a terminal."""
    if total >= _PROGRESS_FROM and sys.stderr.isatty():
        filled = 30 * done // total
        bar = "#" * filled + "." * (30 - filled)
        end = "\r\033[K" if done == total else ""
        print(f"\rprompt [{bar}] {done} of {total}{end}", end="", file=sys.stderr, flush=True)
