"""Chooses tokens from logits, greedy or sampled, and cuts them where a sequence ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real

import torch

from nwor_specpv import (
    MAX_TREE_ROWS,
    NworError,
    Tree,
    TwoLevel,
    accept_chain_sampling,
    accept_greedy,
    accept_sampling,
    confirm_greedy,
    confirm_sampling,
    make_coins,
    target_probs,
)

from .arguments import as_integer

_GOLDEN = 0x9E3779B97F4A7C15
_TAIL_SALT = 1 << 20  # above every number of cuts, which is the other salt
_MOST_TOKENS = 2**31 - 1  # more than any vocabulary has


@dataclass(frozen=True)
class Sampling:
    """Options of sampling. Temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
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

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities [B, R, V] from logits [B, R, V]."""
        return target_probs(
            logits, temperature=float(self.temperature), top_k=self.top_k, top_p=float(self.top_p)
        )


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


def fold_seed(seed: int, salt: int) -> int:
    """A different seed for each salt, as int64."""
    mixed = (seed + salt * _GOLDEN) & (1 << 64) - 1
    return mixed - (1 << 64) if mixed >> 63 else mixed


def judge(
    sampling: Sampling,
    tree: Tree,
    logits: torch.Tensor,
    seeds: Sequence[int],
) -> tuple[list[Verdict], torch.Tensor | None]:
    """Verdicts on a batch of trees from logits [B, R, V]; for sampling also probabilities."""
    probs = None
    if sampling.greedy:
        ids = logits.argmax(-1)
        accepted = accept_greedy(tree.tokens, ids, tree.first_child, tree.next_sibling)
    else:
        probs = sampling.probabilities(logits)
        coins, final = _coins(seeds, tree.positions[:, 0] + 1, tree.rows, logits.device)
        accepted = accept_sampling(
            tree.tokens, probs, tree.first_child, tree.next_sibling, coins, final
        )
    path, counts, following = (part.tolist() for part in accepted)
    verdicts = [
        Verdict(rows[:count], _checked(token))
        for rows, count, token in zip(path, counts, following, strict=True)
    ]
    return verdicts, probs


def confirm(
    sampling: Sampling,
    chain: list[int],
    chain_logits: torch.Tensor,
    partial_probs: torch.Tensor | None,
    tree: Tree,
    logits: torch.Tensor,
    seed: int,
) -> tuple[Verdict, torch.Tensor | None]:
    """Lossless mode: judges one request's tail, the tokens `chain` [T + 1], then its tree."""
    device = logits.device
    tokens = torch.tensor([chain], device=device)
    drafts = torch.tensor([len(chain) - 1], dtype=torch.int32, device=device)
    walk = (tree.first_child, tree.next_sibling)
    if sampling.greedy:
        judged = confirm_greedy(
            tokens, chain_logits.argmax(-1)[None], drafts, tree.tokens, logits.argmax(-1), *walk
        )
        return _verdict(judged, 0, len(chain)), None
    probs = sampling.probabilities(logits)
    at = tree.positions[:, 0] + 1
    coins, final = _coins([seed], at, tree.rows, device)
    # The tail has its own coins, since those of its steps are used. Each belongs to the position of
    # the token it decides, so that no later tail uses it again.
    own, first, step = [fold_seed(seed, _TAIL_SALT)], at - (len(chain) - 1), MAX_TREE_ROWS - 1

    def piece(begin: int) -> tuple[torch.Tensor | None, ...]:
        """The token at `begin`, the next `step` drafts, and what judges them."""
        rows = tokens[:, begin : begin + step + 1]
        full = sampling.probabilities(chain_logits[None, begin : begin + step + 1])
        drawn = None if partial_probs is None else partial_probs[:, begin : begin + step]
        return rows, full, drawn, _coins(own, first + begin, rows.shape[1], device)[0]

    *begins, last = range(0, max(1, len(chain) - 1), step)
    for begin in begins:
        _, count, following = accept_chain_sampling(*piece(begin), final)
        if int(count) < step:
            cut = begin + int(count)
            return Verdict([], _checked(int(following)), cut, whole=False), probs
    rows, full, drawn, tail_coins = piece(last)
    judged = confirm_sampling(
        rows, full, drawn, drafts - last, tree.tokens, probs, *walk, tail_coins, coins, final
    )
    return _verdict(judged, last, len(chain)), probs


def _verdict(judged: TwoLevel, before: int, length: int) -> Verdict:
    """The verdict on a chain of `length` tokens whose first `before` drafts are confirmed."""
    confirmed, count = before + int(judged.confirmed), int(judged.counts)
    path = judged.path[0, :count].tolist()
    return Verdict(path, _checked(int(judged.next_token)), confirmed, confirmed == length - 1)


def _checked(token: int) -> int:
    """Raises if no token was chosen: on CUDA, NaN logits raise nothing themselves."""
    if token < 0:
        raise NworError("logits: got NaN, infinity or no token to choose from, expected numbers")
    return token


def _coins(
    seeds: Sequence[int], positions: torch.Tensor, rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    return make_coins(torch.tensor(list(seeds), device=device), positions, rows)
