"""Chooses tokens from logits, greedy or sampled, and cuts them where a sequence ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from nwor_specpv import (
    NworError,
    Tree,
    accept_greedy,
    accept_sampling,
    confirm_greedy,
    make_coins,
    target_probs,
)

from .arguments import as_integer

_MOST_TOKENS = 2**31 - 1  # more than any vocabulary has


@dataclass(frozen=True)
class Sampling:
    """Options of sampling. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise NworError(f"{name}: got {value!r}, expected a number")
        if not (self.temperature >= 0 and math.isfinite(_float32(self.temperature))):
            raise NworError(
                f"temperature: got {self.temperature!r}, expected a finite number, 0 or more, in "
                "float32"
            )
        top_k = as_integer(self.top_k)
        if top_k is None or top_k < 0:
            raise NworError(f"top_k: got {self.top_k!r}, expected 0 (all) or more")
        object.__setattr__(self, "top_k", min(top_k, _MOST_TOKENS))
        if not (self.top_p <= 1 and _float32(self.top_p) > 0):
            raise NworError(
                f"top_p: got {self.top_p!r}, expected more than 0, at most 1, in float32"
            )
        if not 0 <= self.min_p <= 1:
            raise NworError(f"min_p: got {self.min_p!r}, expected 0 (all) to 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def unused(self) -> dict[str, float]:
        """Options that were set and change nothing, because decoding is greedy."""
        neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        given = {name: getattr(self, name) for name in neutral}
        return {name: given[name] for name in given if self.greedy and given[name] != neutral[name]}

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities [B, R, V] from logits [B, R, V]."""
        probs = target_probs(
            logits, temperature=float(self.temperature), top_k=self.top_k, top_p=float(self.top_p)
        )
        if self.min_p:
            least = self.min_p * probs.amax(-1, keepdim=True)
            probs = probs.masked_fill(probs < least, 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs


@dataclass
class Verdict:
    """The target's verdict on one request's rows."""

    path: list[int]  # accepted rows of the tree
    next_token: int
    confirmed: int = 0  # lossless: confirmed tokens of the tail
    whole: bool = True  # the whole tail was confirmed


def _float32(value: Real) -> float:
    try:
        return torch.tensor(float(value), dtype=torch.float32).item()
    except (OverflowError, RuntimeError):  # too large for a float
        return math.inf


def fold_seed(seed: int) -> int:
    """Any whole number as an int64."""
    mixed = seed & (1 << 64) - 1
    return mixed - (1 << 64) if mixed >> 63 else mixed


def choose_tokens(
    sampling: Sampling, logits: torch.Tensor, seeds: Sequence[int], positions: torch.Tensor
) -> torch.Tensor:
    """The target's token after every row [B, R], -1 where logits [B, R, V] are no numbers.

    A sampled token depends on its row's logits, its request's seed and its position [B, R] alone.
    So drafts are accepted where they are what plain sampling gives, and never change a text.
    """
    if sampling.greedy:
        ids = logits.argmax(-1)
        best = logits.gather(-1, ids[..., None])[..., 0]
        return ids.masked_fill(~best.isfinite(), -1)
    batch, rows, _ = logits.shape
    probs = sampling.probabilities(logits.flatten(0, 1)[:, None])  # a tail has many rows
    own = torch.tensor(list(seeds), device=logits.device).repeat_interleave(rows)
    coins, final = make_coins(own, positions.flatten(), 1)
    leaf = torch.full((batch * rows, 1), -1, dtype=torch.int32, device=logits.device)
    root = torch.zeros(batch * rows, 1, dtype=torch.int64, device=logits.device)
    _, _, drawn = accept_sampling(root, probs, leaf, leaf, coins, final)
    return drawn.unflatten(0, (batch, rows))


def judge(
    sampling: Sampling, tree: Tree, logits: torch.Tensor, seeds: Sequence[int]
) -> list[Verdict]:
    """Verdicts on a batch of trees from logits [B, R, V]."""
    ids = choose_tokens(sampling, logits, seeds, tree.positions + 1)
    accepted = accept_greedy(tree.tokens, ids, tree.first_child, tree.next_sibling)
    path, counts, following = (part.tolist() for part in accepted)
    return [
        Verdict(rows[:count], _checked(token))
        for rows, count, token in zip(path, counts, following, strict=True)
    ]


def confirm(
    sampling: Sampling,
    chain: list[int],
    chain_logits: torch.Tensor,
    tree: Tree,
    logits: torch.Tensor,
    seed: int,
) -> Verdict:
    """Lossless mode: judges one request's tail, the tokens `chain` [T + 1], then its tree."""
    device, tail = logits.device, len(chain) - 1
    first = tree.positions[:, :1] - tail + 1  # of the token after the chain's first
    positions = first + torch.arange(tail, device=device, dtype=first.dtype)
    judged = confirm_greedy(
        torch.tensor([chain], device=device),
        choose_tokens(sampling, chain_logits[None], [seed], positions),
        torch.tensor([tail], dtype=torch.int32, device=device),
        tree.tokens,
        choose_tokens(sampling, logits, [seed], tree.positions + 1),
        tree.first_child,
        tree.next_sibling,
    )
    confirmed, count = int(judged.confirmed), int(judged.counts)
    path = judged.path[0, :count].tolist()
    return Verdict(path, _checked(int(judged.next_token)), confirmed, confirmed == tail)


def _checked(token: int) -> int:
    """Raises if no token was chosen."""
    if token < 0:
        raise NworError(
            "logits: got NaN, infinity or no token to choose from, expected numbers; check the "
            "model's weights, and the logits_processor if there is one"
        )
    return token
