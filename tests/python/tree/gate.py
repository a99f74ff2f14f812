"""The distribution gate: a sampler's exact output distribution, by integration over all its coins.

Target probabilities are multiples of 1 / n, so that the outcome is constant while every coin stays
within one cell of a known grid: a coin that decides between masses changes nothing between two
multiples of 1 / n, the final one nothing between two fractions of denominator at most n. One call
with the middle of every cell, weighted by the cells' sizes, is the integral, not an estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import torch

from tests.python.tree.forest import ancestors, links_of

# (tokens [B, R], target [B, R, V], links, coins [B, R], final [B]) -> path, counts, next_token
Sampler = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def cells(points: set[Fraction]) -> list[tuple[float, float]]:
    """(middle, size) of the pieces that the points cut [0, 1] into."""
    ordered = sorted({Fraction(0), Fraction(1), *(p for p in points if 0 < p < 1)})
    return [(float((a + b) / 2), float(b - a)) for a, b in pairwise(ordered)]


def multiples(n: int) -> list[tuple[float, float]]:
    return cells({Fraction(i, n) for i in range(n)})


def small_fractions(n: int) -> list[tuple[float, float]]:
    return cells({Fraction(i, m) for m in range(1, n + 1) for i in range(m)})


def depth_of(parents: list[int]) -> int:
    return max(len(ancestors(parents, row)) for row in range(len(parents))) - 1


def elder_siblings(parents: list[int], row: int) -> list[int]:
    return [i for i in range(row) if parents[i] == parents[row]]


def emitted_masses(
    tokens: torch.Tensor, weights: np.ndarray, outcome: tuple[torch.Tensor, ...], vocabulary: int
) -> dict[tuple[int, ...], float]:
    """The probability of every beginning of what is emitted."""
    path, counts, following = (part.cpu().numpy() for part in outcome)
    drafts = np.take_along_axis(tokens.cpu().numpy(), np.maximum(path, 0).astype(np.int64), axis=1)
    masses: dict[tuple[int, ...], float] = {}
    code = np.zeros(len(weights), dtype=np.int64)
    for length in range(1, path.shape[1] + 1):
        going = counts >= length - 1
        last = np.where(counts == length - 1, following, drafts[:, length - 1])
        code = code * vocabulary + np.where(going, last, 0)
        found, index = np.unique(code[going], return_inverse=True)
        for value, mass in zip(found, np.bincount(index, weights[going]), strict=True):
            digits = np.base_repr(value, vocabulary).zfill(length)
            masses[tuple(int(digit, 36) for digit in digits)] = float(mass)
    return masses


def deviation(
    sampler: Sampler,
    parents: list[int],
    tokens: list[int],
    target: list[list[int]],
    n: int,
    device: str = "cpu",
) -> float:
    """The largest error of P(emitted begins with ...) over all beginnings the tree knows.

    `target` [R][V] in units of 1 / n. Of siblings with equal tokens the first speaks for all of
    them: what hangs below the others is no text of its own.
    """
    depth, rows, vocabulary = depth_of(parents), len(parents), len(target[0])
    grid = list(product(*[multiples(n)] * depth, small_fractions(n)))
    coins = torch.zeros(len(grid), rows)
    coins[:, :depth] = torch.tensor([[c for c, _ in point[:-1]] for point in grid])
    final = torch.tensor([point[-1][0] for point in grid])
    weights = np.array([np.prod([size for _, size in point]) for point in grid])
    batch = len(grid)
    probs = torch.tensor(target, dtype=torch.float32, device=device) / n
    given = torch.tensor(tokens, device=device).expand(batch, rows)
    links = [torch.tensor(part, dtype=torch.int32, device=device) for part in links_of(parents)]
    outcome = sampler(
        given,
        probs.expand(batch, rows, vocabulary),
        *(part.expand(batch, rows) for part in links),
        coins.to(device),
        final.to(device),
    )
    masses = emitted_masses(given, weights, outcome, vocabulary)
    worst = abs(weights.sum() - 1)
    for row in range(rows):
        above = ancestors(parents, row)[-2::-1]
        if any(tokens[i] in [tokens[j] for j in elder_siblings(parents, i)] for i in above):
            continue
        text = tuple(tokens[i] for i in above)
        reached = Fraction(1)
        for i in above:
            reached *= Fraction(target[parents[i]][tokens[i]], n)
        for token in range(vocabulary):
            expected = float(reached * Fraction(target[row][token], n))
            worst = max(worst, abs(masses.get((*text, token), 0.0) - expected))
    return worst
