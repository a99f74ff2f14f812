"""Estimates acceptance on greedy texts from the ranks of the target's choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .corpus import Corpus
from .prompts import KINDS

CHAIN = (1, 1, 1, 1)
WIDTHS = (4, 3, 2, 1)


def tokens_per_step(
    ranks: torch.Tensor, counts: torch.Tensor, start: torch.Tensor, widths: Sequence[int]
) -> tuple[int, int]:
    """(tokens, steps) of decoding each row's first text with trees of these widths.

    `ranks` [steps, rows, L]; `counts` [rows, L]: the next token belongs to the answer. A tree has
    the right draft at depth d if its rank is below widths[d]. A step gives the drafts that were
    right and the target's own token, unless the answer ends before it.
    """
    hits = torch.stack([ranks[depth] < width for depth, width in enumerate(widths)])
    accepted = hits.int().cumprod(0).sum(0)  # [rows, L] at each entry
    tokens = steps = 0
    rows = zip(accepted.tolist(), counts.tolist(), start.tolist(), strict=True)
    for gains, answer, begin in rows:
        places = [at for at in range(len(answer)) if answer[at] and begin[at] == 0]
        if not places:
            continue
        # Entry `at` drafts what follows token at + 1; its first draft is chosen by row at + 1.
        at, last = places[0], places[-1]
        while at + 1 <= last:
            gain = min(gains[at], last - at)
            tokens, steps = tokens + min(gain + 1, last - at), steps + 1
            at += gain + 1
    return tokens, steps


def summary(ranks: torch.Tensor, corpus: Corpus) -> dict[str, Any]:
    """By kind: tokens per step (chain of 4, widths 4,3,2,1) and hits of the first guess."""
    rows, length = corpus.tokens.shape
    placed = ranks.view(ranks.shape[0], rows, length).cpu()
    counts, start = (corpus.weight >= 1).cpu(), corpus.start.cpu()
    kinds = corpus.kind[:, 0].cpu()
    found = {}
    for index, kind in enumerate(KINDS):
        mine = kinds == index
        if not mine.any():
            continue
        part = (placed[:, mine], counts[mine], start[mine])
        answer = part[1] & (part[2] == 0)
        steps = {}
        for name, widths in (("chain_4", CHAIN), ("widths_4321", WIDTHS)):
            tokens, count = tokens_per_step(*part, widths)
            steps[name] = round(tokens / max(count, 1), 3)
        hits = []
        for step in range(ranks.shape[0]):
            # Entries whose predicted row belongs to the answer.
            ahead = torch.zeros_like(answer)
            ahead[:, : length - step - 1] = answer[:, step + 1 :] & (
                part[2][:, step + 1 :] == part[2][:, : length - step - 1]
            )
            total = int(ahead.sum())
            hits.append(round(int((part[0][step][ahead] == 0).sum()) / max(total, 1), 3))
        found[kind] = {**steps, "top1_by_depth": hits}
    return found
