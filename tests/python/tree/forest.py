"""Random trees and what should follow from them, from sets and dictionaries instead of words.

Nothing here calls the library: a tree is a list of parents, a mask a set of rows, a walk a
loop over children found by searching.
"""

from __future__ import annotations

import os
import random
from fractions import Fraction
from itertools import pairwise

import torch

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
SEED = int(os.environ.get("NWOR_TEST_SEED", random.SystemRandom().randrange(2**31)))


def random_parents(rows: int, rng: random.Random) -> list[int]:
    """Bushy, deep or in between; every row but the first below an earlier one."""
    reach = rng.choice([1, 3, rows])
    return [-1] + [rng.randrange(max(0, row - reach), row) for row in range(1, rows)]


def children_of(parents: list[int], row: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == row and child != row]


def ancestors(parents: list[int], row: int) -> list[int]:
    """The row itself, its parent, and so on up to the root."""
    found = [row]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def links_of(parents: list[int]) -> tuple[list[int], list[int]]:
    first, following = [-1] * len(parents), [-1] * len(parents)
    for row in range(len(parents)):
        family = children_of(parents, row)
        if family:
            first[row] = family[0]
        for one, other in pairwise(family):
            following[one] = other
    return first, following


def greedy_walk(parents: list[int], tokens: list[int], targets: list[int]) -> tuple[list[int], int]:
    path, row = [], 0
    while True:
        matching = [c for c in children_of(parents, row) if tokens[c] == targets[row]]
        if not matching:
            return path, targets[row]
        row = matching[0]
        path.append(row)


def draw(masses: list[Fraction], coin: Fraction) -> int:
    """The token whose piece of the masses, laid end to end, holds the coin."""
    place, total = coin * sum(masses), Fraction(0)
    for token, mass in enumerate(masses):
        total += mass
        if place < total:
            return token
    return max(token for token, mass in enumerate(masses) if mass > 0)


def sampling_walk(
    parents: list[int],
    tokens: list[int],
    probs: Fractions,
    coins: list[Fraction],
    final: Fraction,
) -> tuple[list[int], int]:
    """The lossless rule, in exact fractions."""
    path, row = [], 0
    while True:
        target = list(probs[row])
        accepted, mass = None, Fraction(0)
        for child in children_of(parents, row):
            mass += target[tokens[child]]
            if target[tokens[child]] > 0 and coins[len(path)] < mass:
                accepted = child
                break
            target[tokens[child]] = Fraction(0)  # also what makes a repeated token count once
        if accepted is None:
            return path, draw(target if sum(target) > 0 else probs[row], final)
        row = accepted
        path.append(row)


def chain_walk(
    tokens: list[int],
    probs: Fractions,
    drafts: Fractions | list[list[Fraction]],
    coins: list[Fraction],
    final: Fraction,
) -> tuple[int, int]:
    """Leviathan's rule: how many drafts are accepted, and the token after them."""
    for row in range(len(tokens) - 1):
        token = tokens[row + 1]
        p, q = probs[row][token], drafts[row][token]
        if p > 0 and coins[row] * q < p:
            continue
        excess = [max(a - b, Fraction(0)) for a, b in zip(probs[row], drafts[row], strict=True)]
        return row, draw(excess if sum(excess) > 0 else probs[row], final)
    return len(tokens) - 1, draw(probs[len(tokens) - 1], final)


class Fractions:
    """The rows of a tensor in exact fractions, made when they are asked for."""

    def __init__(self, rows: torch.Tensor):
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> list[Fraction]:
        return [Fraction(value) for value in self._rows[row].tolist()]


def random_probs(
    rows: int, vocabulary: int, rng: random.Random, zeros: float = 0.3
) -> torch.Tensor:
    """Rows of float32 probabilities with many zeros and a few large ones."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    weights = torch.rand(rows, vocabulary, generator=generator, dtype=torch.float64) ** 4
    weights[torch.rand(rows, vocabulary, generator=generator) < zeros] = 0
    weights[:, rng.randrange(vocabulary)] += 0.05
    return (weights / weights.sum(-1, keepdim=True)).float()
