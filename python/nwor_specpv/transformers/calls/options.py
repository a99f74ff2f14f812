"""What one call of generate asks for, read and checked."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from nwor_specpv import NworError
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.errors import logger

from .arguments import as_integer, at_least_one
from .processors import Processors
from .sampling import Sampling
from .stopping import StopStrings
from .streaming import Streamer

OnToken = Callable[..., None]


@dataclass
class Options:
    """Of all requests of a call."""

    max_new_tokens: int | None
    sampling: Sampling
    tree: TreeConfig
    stop_ids: frozenset[int]
    seed: int
    on_token: OnToken | None = None
    sequences: int = 1  # of each prompt
    processors: Processors = field(default_factory=Processors)
    stop_strings: StopStrings = field(default_factory=lambda: StopStrings((), None))
    logprobs: bool = False
    streamer: Streamer | None = None
    chunk_rows: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens is None:
            raise NworError("max_new_tokens: got none, expected the most new tokens, 1 or more")
        self.max_new_tokens = at_least_one("max_new_tokens", self.max_new_tokens)
        self.sequences = at_least_one("num_return_sequences", self.sequences)
        self.chunk_rows = _checked_chunk(self.chunk_rows)
        self.tree = self.tree or TreeConfig()
        if not isinstance(self.tree, TreeConfig):
            raise NworError(f"tree: got {type(self.tree).__name__}, expected a TreeConfig")
        if not isinstance(self.seed, Integral | None):
            raise NworError(f"seed: got {self.seed!r}, expected a whole number or None")
        if not (self.on_token is None or callable(self.on_token)):
            got = type(self.on_token).__name__
            raise NworError(f"on_token: got {got}, expected a function")
        if self.sequences > 1 and self.sampling.greedy:
            raise NworError(
                f"num_return_sequences: got {self.sequences} at temperature 0, which gives the "
                "same text each time; expected 1, or a temperature above 0"
            )
        self.seed = secrets.randbits(31) if self.seed is None else int(self.seed)

    def warn_unused(self) -> None:
        """Logs options of sampling that greedy decoding does not use."""
        unused = self.sampling.unused()
        if unused:
            logger.warning(
                "%s: has no effect at temperature 0, which is greedy; set a temperature above 0 "
                "to sample",
                ", ".join(f"{name}={value}" for name, value in unused.items()),
            )


def make_streamer(streamer: Any) -> Streamer | None:
    return None if streamer is None else Streamer(streamer)


def _checked_chunk(chunk_rows: Any) -> int:
    count = as_integer(chunk_rows)
    if count is None or count < 0 or count == 1:
        raise NworError(f"chunk_rows: got {chunk_rows!r}, expected 0 (off) or 2 and more")
    return count
