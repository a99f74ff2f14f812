"""How tokens are chosen from logits: greedy or sampled, and where a run of them ends."""

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
    confirm_sampling,
    make_coins,
    target_probs,
)

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy. `seeds` has one entry per request."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise NworError(f"{name}: got {value!r}, expected a number")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise NworError(f"temperature: got {self.temperature!r}, expected 0 or more")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise NworError(f"top_k: got {self.top_k!r}, expected 0 (all) or more")
        if not 0 < self.top_p <= 1:
            raise NworError(f"top_p: got {self.top_p!r}, expected more than 0, at most 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, R, V] from [B, R, V]."""
        return target_probs(
            logits, temperature=float(self.temperature), top_k=self.top_k, top_p=float(self.top_p)
        )


@dataclass
class Verdict:
    """What the target says about one request's rows."""

    path: list[int]  # accepted rows of the tree
    next_token: int
    confirmed: int = 0  # lossless: tokens of the tail that stand
    whole: bool = True  # all of them


def fold_seed(seed: int, salt: int) -> int:
    """Another seed for each salt, as int64."""
    mixed = (seed + salt * _GOLDEN) & (1 << 64) - 1
    return mixed - (1 << 64) if mixed >> 63 else mixed


def judge(
    sampling: Sampling,
    tree: Tree,
    logits: torch.Tensor,
    seeds: Sequence[int],
) -> tuple[list[Verdict], torch.Tensor | None]:
    """Verdicts over a batch of trees from logits [B, R, V]; sampling also gives probabilities."""
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
        Verdict(rows[:count], token)
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
    """Lossless mode: one request's tail, whose tokens are `chain` [T + 1], then its tree."""
    device = logits.device
    tokens = torch.tensor([chain], device=device)
    drafts = torch.tensor([len(chain) - 1], dtype=torch.int32, device=device)
    walk = (tree.first_child, tree.next_sibling)
    probs = None
    if sampling.greedy:
        judged = confirm_greedy(
            tokens, chain_logits.argmax(-1)[None], drafts, tree.tokens, logits.argmax(-1), *walk
        )
    else:
        probs = sampling.probabilities(logits)
        # Coins of the tail's own: those of its steps have been used.
        at = tree.positions[:, 0] + 1
        chain_coins, _ = _coins([fold_seed(seed, 1 << 20)], at, len(chain), device)
        coins, final = _coins([seed], at, tree.rows, device)
        judged = confirm_sampling(
            tokens,
            sampling.probabilities(chain_logits[None]),
            partial_probs,
            drafts,
            tree.tokens,
            probs,
            *walk,
            chain_coins,
            coins,
            final,
        )
    confirmed, count = int(judged.confirmed), int(judged.counts)
    path = judged.path[0, :count].tolist()
    whole = confirmed == len(chain) - 1
    return Verdict(path, int(judged.next_token), confirmed, whole), probs


def cut_run(run: list[int], stop_ids: frozenset[int], room: int) -> tuple[int, str | None]:
    """How many tokens of a run are emitted, and why it ends there: "stop", "length" or None."""
    for index, token in enumerate(run[:room]):
        if token in stop_ids:
            return index + 1, "stop"
    return (room, "length") if len(run) >= room else (len(run), None)


def _coins(
    seeds: Sequence[int], positions: torch.Tensor, rows: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    return make_coins(torch.tensor(list(seeds), device=device), positions, rows)
