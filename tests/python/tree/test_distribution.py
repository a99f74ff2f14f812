"""Sampling is lossless: exact integration over all coins, and a statistical test at full size.

Each wrong sampler here has been somebody's; the gate must catch every one of them.
"""

from __future__ import annotations

import random
from fractions import Fraction
from itertools import pairwise, permutations, product

import numpy as np
import pytest
import torch

from nwor_specpv import accept_chain_sampling, accept_sampling, make_coins, tree_from_parents
from tests.python.tree.forest import DEVICES, children_of, links_of
from tests.python.tree.gate import deviation, emitted_masses, small_fractions

# name -> parents, tokens, target rows in units of 1 / n, n
CASES: dict[str, tuple[list[int], list[int], list[list[int]], int]] = {
    "one sibling": ([-1, 0], [0, 1], [[3, 4, 1], [2, 5, 1]], 8),
    "three siblings": ([-1, 0, 0, 0], [0, 2, 0, 3], [[1, 2, 4, 1]] + [[2, 2, 2, 2]] * 3, 8),
    "a chain of three": (
        [-1, 0, 1, 2],
        [0, 1, 1, 0],
        [[1, 4, 1], [2, 3, 1], [5, 0, 1], [2, 2, 2]],
        6,
    ),
    "a full binary tree": (
        [-1, 0, 0, 1, 1, 2, 2],
        [0, 1, 2, 0, 1, 2, 3],
        [[1, 3, 3, 1], [4, 2, 1, 1], [0, 1, 2, 5], *[[2, 2, 2, 2]] * 4],
        8,
    ),
    "one deep, one shallow": (
        [-1, 0, 0, 1, 3],
        [0, 2, 1, 0, 1],
        [[2, 2, 2], [3, 2, 1], [6, 0, 0], [1, 4, 1], [2, 2, 2]],
        6,
    ),
    "equal siblings": (
        [-1, 0, 0, 0, 1, 2],
        [0, 1, 1, 2, 0, 2],
        [[2, 4, 2], [3, 3, 2], [3, 3, 2], [8, 0, 0], [1, 1, 6], [2, 2, 4]],
        8,
    ),
    "impossible siblings": (
        [-1, 0, 0, 0, 1],
        [0, 0, 3, 1, 2],
        [[0, 5, 3, 0], [2, 2, 2, 2], [8, 0, 0, 0], [1, 2, 3, 2], [2, 2, 2, 2]],
        8,
    ),
    "siblings that cover all": (
        [-1, 0, 0, 0, 2],
        [0, 1, 0, 2, 1],
        [[2, 3, 3], [4, 4, 0], [0, 0, 8], [1, 1, 6], [3, 3, 2]],
        8,
    ),
    "a certain token": ([-1, 0, 0], [0, 1, 0], [[0, 7, 0], [1, 3, 3], [2, 2, 3]], 7),
    "tenths": ([-1, 0, 0], [0, 3, 1], [[1, 2, 3, 4], [3, 3, 3, 1], [1, 1, 1, 7]], 10),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_target_distribution_for_every_coin(device: str, case: str) -> None:
    assert deviation(accept_sampling, *CASES[case], device=device) < 1e-6


@pytest.mark.parametrize("replacement", [True, False])
def test_however_the_siblings_were_drawn(replacement: bool) -> None:
    """Three siblings by a drafter that has nothing to do with the target, over all its draws."""
    draft = [Fraction(1, 2), Fraction(1, 8), Fraction(1, 8), Fraction(1, 4)]
    target = [1, 4, 0, 3]
    triples = product(range(4), repeat=3) if replacement else permutations(range(4), 3)
    total = Fraction(0)
    for siblings in triples:
        chance, left = Fraction(1), Fraction(1)
        for token in siblings:
            chance *= draft[token] / left
            left -= 0 if replacement else draft[token]
        total += chance
        rows = [target, *[[8, 0, 0, 0]] * 3]
        assert deviation(accept_sampling, [-1, 0, 0, 0], [0, *siblings], rows, 8) < 1e-6
    assert total == 1


# ---- chains -----------------------------------------------------------------------------------


def chain_deviation(sampler, target: list[list[int]], draft: list[list[int]] | None, n: int):
    """As the gate, over all drafts too: each position drawn from `draft`, or any without it."""
    depth, vocabulary = len(target) - 1, len(target[0])
    grid = np.array(list(product(*[small_fractions(n)] * (depth + 1))))
    sizes = grid[:, :, 1].prod(1)
    tokens = list(product(range(vocabulary), repeat=depth))
    batch = len(tokens) * len(grid)
    drafts = torch.tensor([[0, *row] for row in tokens]).repeat_interleave(len(grid), 0)
    points = torch.from_numpy(np.tile(grid[:, :, 0], (len(tokens), 1))).float()
    coins = torch.zeros(batch, depth + 1)
    coins[:, :depth] = points[:, :depth]
    probs = (torch.tensor(target, dtype=torch.float32) / n).expand(batch, -1, -1)
    if draft is None:
        q, chances = None, [Fraction(1, len(tokens))] * len(tokens)
    else:
        q = (torch.tensor(draft, dtype=torch.float32) / n).expand(batch, -1, -1)
        chances = [
            Fraction(int(np.prod([draft[i][t] for i, t in enumerate(row)])), n**depth)
            for row in tokens
        ]
    outcome = sampler(drafts, probs, q, coins, points[:, depth].contiguous())
    weights = np.repeat([float(chance) for chance in chances], len(grid)) * np.tile(
        sizes, len(tokens)
    )
    masses = emitted_masses(drafts, weights, outcome, vocabulary)
    worst = abs(weights.sum() - 1)
    # Every text that is a draft has a row; its next token follows that row's target.
    reach = {(): 1.0}
    for length in range(depth + 1):
        for text in product(range(vocabulary), repeat=length):
            for token in range(vocabulary):
                following = reach[text] * target[length][token] / n
                reach[(*text, token)] = following
                if length == 0:
                    worst = max(worst, abs(masses.get((token,), 0.0) - following))
    if draft is not None:
        for text in product(range(vocabulary), repeat=2):
            if depth < 2:
                break
            # Beyond the first token only what was accepted goes on: compare what follows it.
            first = masses_through(drafts, weights, outcome, text[0])
            if first > 0:
                both = masses.get(text, 0.0)
                worst = max(worst, abs(both / first - target[1][text[1]] / n))
    return worst


def masses_through(drafts, weights, outcome, token: int) -> float:
    accepted = (outcome[1] >= 1) & (drafts[:, 1] == token)
    return float(weights[accepted.numpy()].sum())


CHAINS = [
    ([[3, 4, 1], [2, 5, 1]], [[4, 2, 2]], 8),
    ([[3, 4, 1], [2, 5, 1]], [[0, 0, 8]], 8),
    ([[0, 4, 2], [2, 3, 1], [1, 1, 4]], [[2, 4, 0], [3, 3, 0]], 6),
    ([[2, 2, 1], [2, 2, 1]], [[2, 2, 1]], 5),
]


@pytest.mark.parametrize("case", range(len(CHAINS)))
def test_chains_equal_the_target_distribution(case: int) -> None:
    target, draft, n = CHAINS[case]
    assert chain_deviation(accept_chain_sampling, target, draft, n) < 1e-6
    assert chain_deviation(accept_chain_sampling, target, None, n) < 1e-6


# ---- samplers that are wrong ------------------------------------------------------------------


def slow_sampler(*, share=True, remove=True, once=True, own_coin=True, zero=False, fresh=False):
    """The rule as a loop, with a way to break each part of it."""

    def sample(tokens, target, first, following, coins, final):
        batch, rows = tokens.shape
        path = torch.full((batch, rows), -1, dtype=torch.int32)
        counts, chosen = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch).long()
        ids, table = tokens[0].tolist(), target[0].double().tolist()
        parents = [-1] * rows
        for row in range(rows):
            child = int(first[0, row])
            while child >= 0:
                parents[child] = row
                child = int(following[0, child])
        for b in range(batch):
            row, depth = 0, 0
            while True:
                coin = float(coins[b, depth])
                p, mass, accepted, seen = list(table[row]), 0.0, None, set()
                for order, child in enumerate(children_of(parents, row)):
                    token = ids[child]
                    if once and token in seen:
                        continue
                    seen.add(token)
                    mass = (mass if share else 0.0) + table[row][token]
                    if fresh:  # a new coin for every sibling, still compared with the sum
                        coin = (coin + 0.37 * order) % 1.0
                    if coin < mass or (zero and coin <= mass):
                        accepted = child
                        break
                    if remove:
                        p[token] = 0.0
                if accepted is None:
                    break
                path[b, depth] = row = accepted
                depth += 1
            counts[b] = depth
            place = (float(final[b]) if own_coin else coin) * sum(p)
            chosen[b] = min(int((np.cumsum(p) <= place).sum()), len(p) - 1)
        return path, counts, chosen

    return sample


def test_the_gate_passes_the_rule_written_as_a_loop() -> None:
    for case in ("three siblings", "equal siblings", "a chain of three"):
        assert deviation(slow_sampler(), *CASES[case]) < 1e-6


@pytest.mark.parametrize(
    ("wrong", "case"),
    [
        ("share", "three siblings"),  # each sibling compared with its own mass only
        ("remove", "three siblings"),  # rejected siblings stay in the final draw
        ("once", "equal siblings"),  # a repeated token counts twice
        ("own_coin", "three siblings"),  # the coin that rejected also draws
        ("fresh", "three siblings"),
    ],
)
def test_the_gate_catches_a_wrong_sampler(wrong: str, case: str) -> None:
    sampler = slow_sampler(**{wrong: wrong == "fresh"})
    assert deviation(sampler, *CASES[case]) > 1e-2


def test_the_gate_catches_thresholds() -> None:
    def loose(*given):
        return accept_sampling(*given, threshold_single=0.4)

    def short(*given):
        return accept_sampling(*given, threshold_acc=0.5)

    assert deviation(loose, *CASES["three siblings"]) > 1e-2
    assert deviation(short, *CASES["three siblings"]) > 1e-2


def test_the_gate_catches_a_chain_that_ignores_the_draft() -> None:
    def ignoring(tokens, target, draft, coins, final):
        return accept_chain_sampling(tokens, target, None, coins, final)

    def greedy_residual(tokens, target, draft, coins, final):
        """Draws the replacement from p instead of max(p - q, 0)."""
        path, counts, _ = accept_chain_sampling(tokens, target, draft, coins, final)
        row = target[torch.arange(len(counts)), counts.long()].double().cumsum(-1)
        return path, counts, torch.searchsorted(row, final.double()[:, None])[:, 0]

    target, draft, n = CHAINS[0]
    # Without q the rule is right for a drafter without randomness, and so for each draft by itself.
    assert chain_deviation(ignoring, target, draft, n) < 1e-6
    assert chain_deviation(greedy_residual, target, draft, n) > 1e-2


# ---- the ends of the range --------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_coins_of_zero_and_one_never_give_the_impossible(device: str, case: str) -> None:
    parents, tokens, target, n = CASES[case]
    corners = list(product([0.0, 1.0], repeat=len(parents) + 1))
    batch, rows, vocabulary = len(corners), len(parents), len(target[0])
    probs = (torch.tensor(target, dtype=torch.float32) / n).to(device)
    coins = torch.tensor(corners, device=device)
    links = [torch.tensor(part, dtype=torch.int32, device=device) for part in links_of(parents)]
    path, counts, following = accept_sampling(
        torch.tensor(tokens, device=device).expand(batch, rows),
        probs.expand(batch, rows, vocabulary),
        *(part.expand(batch, rows) for part in links),
        coins[:, :-1],
        coins[:, -1],
    )
    for b in range(batch):
        taken = [0, *path[b, : counts[b]].tolist()]
        for above, row in pairwise(taken):
            assert parents[row] == above
            assert target[above][tokens[row]] > 0
        assert target[taken[-1]][int(following[b])] > 0


def test_a_sampler_that_accepts_at_zero_is_wrong_only_there() -> None:
    """Why the corners are tested: an interval of size zero is invisible to any integral."""
    parents, tokens, target, n = CASES["impossible siblings"]
    assert deviation(slow_sampler(zero=True), parents, tokens, target, n) < 1e-6
    links = [torch.tensor([part]) for part in links_of(parents)]
    probs = torch.tensor([target]).float() / n
    zeros = torch.zeros(1, len(tokens))
    path, _, _ = slow_sampler(zero=True)(torch.tensor([tokens]), probs, *links, zeros, zeros[:, 0])
    assert target[0][tokens[path[0, 0]]] == 0


# ---- a vocabulary of full size ----------------------------------------------------------------


def chi_square(drawn: np.ndarray, probs: np.ndarray, alone: int, bins: int) -> float:
    """The `alone` most probable tokens have a bin each, the others share the rest at random.

    Expectation bins - 1, standard deviation sqrt(2 * (bins - 1)).
    """
    best = np.argsort(-probs, kind="stable")
    bin_of = np.empty(len(probs), dtype=np.int64)
    shuffled = np.random.default_rng(1).permutation(best[alone:])
    bin_of[best[:alone]] = np.arange(alone)
    bin_of[shuffled] = alone + np.arange(len(shuffled)) % (bins - alone)
    expected = np.bincount(bin_of, probs, minlength=bins) * len(drawn)
    seen = np.bincount(bin_of[drawn], minlength=bins)
    return float(((seen - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("device", DEVICES)
def test_chi_square_at_a_vocabulary_of_32000(device: str) -> None:
    vocabulary, rounds, bins = 32000, 12000, 60
    generator = torch.Generator().manual_seed(20)
    order = torch.randperm(vocabulary, generator=generator)
    weights = torch.zeros(vocabulary, dtype=torch.float64)
    weights[order] = 1.0 / (torch.arange(vocabulary, dtype=torch.float64) + 1)
    probs = (weights / weights.sum()).float().to(device)
    # The best five, one of them twice, and a few that are hardly possible.
    siblings = [int(order[i]) for i in (0, 1, 2, 1, 3, 4, 20000, 31000)]
    rows = 1 + len(siblings)
    parents = torch.tensor([[-1] + [0] * len(siblings)], dtype=torch.int32, device=device)
    tree = tree_from_parents(parents, torch.zeros(1, dtype=torch.int32, device=device))
    tokens = torch.tensor([0, *siblings], device=device).expand(rounds, rows)
    coins, final = make_coins(
        torch.full((rounds,), 77, device=device), torch.arange(rounds, device=device) * 8, rows
    )
    path, counts, following = accept_sampling(
        tokens,
        probs.expand(rounds, rows, vocabulary),
        tree.first_child.expand(rounds, rows),
        tree.next_sibling.expand(rounds, rows),
        coins,
        final,
    )
    first = torch.where(
        counts > 0, tokens.gather(1, path[:, :1].clamp(min=0).long())[:, 0], following
    )
    assert 0.1 < counts.float().mean() < 0.6
    exact = probs.double().cpu().numpy()
    limit = bins - 1 + 5 * np.sqrt(2 * (bins - 1))
    assert chi_square(first.cpu().numpy(), exact, 5, bins) < limit
    # And it can fail: drafts accepted a tenth too often move it far beyond.
    rng = random.Random(3)
    wrong = [siblings[rng.randrange(3)] if rng.random() < 0.1 else t for t in first.tolist()]
    assert chi_square(np.array(wrong), exact, 5, bins) > 2 * limit
