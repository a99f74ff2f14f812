"""One sequence of a generation, and its rows in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nwor_specpv import StepDecision, StoredCache


@dataclass
class Request:
    """One sequence. `tokens` ends with the root, whose K/V is not cached yet."""

    key: int
    index: int  # among the prompts of the call
    tokens: list[int]
    prompt_len: int
    max_new_tokens: int
    seed: int
    shown: int  # tokens that the user has; fewer than all only in lossless mode
    cached: int = 0  # tokens in the cache
    finish: str | None = None
    partial: StoredCache | None = None
    pending: list[int] = field(default_factory=list)  # rest of a long chain, verified in chunks
    depths: list[int] = field(default_factory=list)  # depth of every new token; 0: the target's own
    logprobs: list[float] = field(default_factory=list)  # of every new token, if asked for
    features: list[torch.Tensor] = field(default_factory=list)

    @property
    def room(self) -> int:
        """How many new tokens may still follow."""
        return self.max_new_tokens - (len(self.tokens) - self.prompt_len)

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_len : self.shown]


@dataclass
class Part:
    """A request's rows in a step: `fed` before the root, then the tree, its root first."""

    request: Request
    fed: list[int]
    tokens: list[int]
    parents: list[int]
    prefix_len: int
    decision: StepDecision | None = None
    want_fed_logits: bool = False

    @property
    def num_rows(self) -> int:
        return len(self.fed) + len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == row - 1 for row, parent in enumerate(self.parents))
