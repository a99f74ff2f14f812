"""Two-level acceptance: greedy equals plain decoding, sampling is exact in distribution.

The gate integrates over every coin of both levels: probabilities are multiples of 1 / N, so the
outcome is constant within the cells of a known grid, and one call per cell is the integral.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from nwor_specpv import NworError, accept_sampling, confirm_greedy, confirm_sampling
from tests.python.specpv.contexts import seeded
from tests.python.tree.gate import multiples, small_fractions

N, VOCAB = 4, 3
CHAIN = [[-1, 0]]  # parents of a root and one draft


def links(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    first_child = torch.tensor([[1, -1]], dtype=torch.int32).expand(batch, 2).contiguous()
    return first_child, torch.full((batch, 2), -1, dtype=torch.int32)


class World:
    """Distributions of the full and of the partial model for every text of up to four tokens."""

    def __init__(self, rng) -> None:
        self.full: dict[tuple[int, ...], list[int]] = {}
        self.partial: dict[tuple[int, ...], list[int]] = {}
        for length in range(4):
            for text in product(range(VOCAB), repeat=length):
                for table in (self.full, self.partial):
                    cuts = sorted(rng.choices(range(N + 1), k=VOCAB - 1))
                    parts = [b - a for a, b in zip([0, *cuts], [*cuts, N], strict=True)]
                    table[text] = parts

    def probs(self, table: dict, text: tuple[int, ...]) -> list[float]:
        return [part / N for part in table[text]]


def partial_step(world: World, draft: int) -> list[tuple[float, list[int]]]:
    """What a partial step over (root, draft) appends, and how likely, over all of its coins."""
    grid = list(product(multiples(N), small_fractions(N)))
    batch = len(grid)
    probs = torch.tensor(
        [world.probs(world.partial, ()), world.probs(world.partial, (draft,))]
    ).expand(batch, 2, VOCAB)
    coins = torch.tensor([[c, 0.5] for (c, _), _ in grid])
    final = torch.tensor([f for _, (f, _) in grid])
    tokens = torch.tensor([[0, draft]]).expand(batch, 2).contiguous()
    _, counts, following = accept_sampling(tokens, probs, *links(batch), coins, final)
    outcomes: dict[tuple[int, ...], float] = {}
    for (a, b), count, token in zip(grid, counts.tolist(), following.tolist(), strict=True):
        text = ((draft,) if count else ()) + (token,)
        outcomes[text] = outcomes.get(text, 0.0) + a[1] * b[1]
    return [(weight, list(text)) for text, weight in outcomes.items()]


def full_step(world: World, tail: list[int], draft: int, known: bool) -> dict[tuple, float]:
    """What the full step emits after it was fed the tail and a tree of one draft."""
    drafts = len(tail)
    axes = [small_fractions(N) if known else multiples(N)] * drafts
    grid = list(product(*axes, multiples(N), small_fractions(N)))
    batch = len(grid)
    texts = [tuple(tail[:i]) for i in range(drafts + 1)]
    chain_probs = torch.tensor([world.probs(world.full, t) for t in texts])
    partial = torch.tensor([world.probs(world.partial, t) for t in texts[:-1]])
    chain_coins = torch.zeros(batch, drafts + 1)
    chain_coins[:, :drafts] = torch.tensor([[c for c, _ in point[:drafts]] for point in grid])
    coins = torch.tensor([[point[drafts][0], 0.5] for point in grid])
    final = torch.tensor([point[-1][0] for point in grid])
    weights = np.array([np.prod([size for _, size in point]) for point in grid])
    tree = [world.probs(world.full, tuple(tail)), world.probs(world.full, (*tail, draft))]
    result = confirm_sampling(
        torch.tensor([[0, *tail]]).expand(batch, -1).contiguous(),
        chain_probs.expand(batch, -1, -1).contiguous(),
        partial.expand(batch, -1, -1).contiguous() if known else None,
        torch.full((batch,), drafts, dtype=torch.int32),
        torch.tensor([[tail[-1], draft]]).expand(batch, 2).contiguous(),
        torch.tensor(tree).expand(batch, 2, VOCAB).contiguous(),
        *links(batch),
        chain_coins,
        coins,
        final,
    )
    emitted: dict[tuple, float] = {}
    for point in range(batch):
        confirmed, taken = int(result.confirmed[point]), int(result.counts[point])
        assert int(result.accepted[point]) == confirmed + taken
        text = (*tail[:confirmed], *([draft] if taken else []), int(result.next_token[point]))
        emitted[text] = emitted.get(text, 0.0) + weights[point]
    return emitted


@pytest.mark.parametrize("known", [True, False], ids=["partial probabilities", "without them"])
def test_both_levels_together_equal_the_full_distribution(known: bool) -> None:
    rng = seeded()
    world = World(rng)
    masses: dict[tuple, float] = {}
    lengths = set()
    for weight, tail in partial_step(world, draft=1):
        lengths.add(len(tail))
        for text, mass in full_step(world, tail, draft=2, known=known).items():
            for length in range(1, len(text) + 1):
                begin = text[:length]
                masses[begin] = masses.get(begin, 0.0) + weight * mass
    assert abs(sum(m for t, m in masses.items() if len(t) == 1) - 1) < 1e-5
    # Every beginning that is always reached, and those conditional on having been reached.
    for token in range(VOCAB):
        expected = Fraction(world.full[()][token], N)
        assert masses.get((token,), 0.0) == pytest.approx(float(expected), abs=1e-5)
    for text, mass in masses.items():
        longer = sum(masses.get((*text, t), 0.0) for t in range(VOCAB))
        if longer < 1e-9 or len(text) > 3:
            continue
        for token in range(VOCAB):
            expected = longer * world.full[text][token] / N
            assert masses.get((*text, token), 0.0) == pytest.approx(expected, abs=1e-5), text
        assert longer <= mass + 1e-5


def test_the_gate_notices_a_tail_that_is_taken_on_trust() -> None:
    """A host that keeps the tail unseen emits the partial distribution: the gate sees it."""
    rng = seeded()
    while True:
        world = World(rng)
        if world.full[()] != world.partial[()]:
            break
    emitted = [0.0] * VOCAB
    for weight, tail in partial_step(world, draft=1):
        emitted[tail[0]] += weight
    assert emitted == pytest.approx([p / N for p in world.partial[()]], abs=1e-5)
    assert emitted != pytest.approx([p / N for p in world.full[()]], abs=1e-3)


def test_greedy_confirms_until_the_first_disagreement() -> None:
    rng = seeded()
    for _ in range(50):
        drafts = rng.randrange(0, 4)
        chain = [rng.randrange(2) for _ in range(drafts + 1)]
        told = [rng.randrange(2) for _ in range(drafts)]
        tree, tree_told = [chain[-1], rng.randrange(2)], [rng.randrange(2), rng.randrange(2)]
        # Row by row, as plain decoding would go on.
        confirmed = 0
        while confirmed < drafts and told[confirmed] == chain[confirmed + 1]:
            confirmed += 1
        if confirmed < drafts:
            taken, following = 0, told[confirmed]
        else:
            taken = int(tree_told[0] == tree[1])
            following = tree_told[taken]
        pad = 2  # the batch may hold longer chains
        result = confirm_greedy(
            torch.tensor([chain + [7] * pad]),
            torch.tensor([told + [7] * pad]),
            torch.tensor([drafts], dtype=torch.int32),
            torch.tensor([tree]),
            torch.tensor([tree_told]),
            *links(1),
        )
        assert result.confirmed.tolist() == [confirmed]
        assert result.counts.tolist() == [taken]
        assert result.accepted.tolist() == [confirmed + taken]
        assert result.next_token.tolist() == [following]
        assert result.path[0, 0].item() == (1 if taken else -1)


def two_chains(drafts: int) -> dict[str, torch.Tensor]:
    """Two chains that the target confirms, and trees whose only draft it takes."""
    chain = torch.arange(drafts + 1).expand(2, -1)
    return {
        "chain": chain,
        "told": chain[:, 1:],
        "num_drafts": torch.full((2,), drafts, dtype=torch.int32),
        "tokens": torch.tensor([[drafts, 6]] * 2),
        "target_ids": torch.tensor([[6, 5]] * 2),
    }


def judge(given: dict[str, torch.Tensor], sampling: bool):
    tree = given["target_ids"]
    if not sampling:
        parts = (given["chain"], given["told"], given["num_drafts"], given["tokens"], tree)
        return confirm_greedy(*parts, *links(2))
    certain = [torch.nn.functional.one_hot(ids, 8).float() for ids in (given["told"], tree)]
    coins = [torch.full(size, 0.5) for size in ((2, given["chain"].shape[1]), (2, 2), (2,))]
    parts = (given["chain"], certain[0], None, given["num_drafts"], given["tokens"], certain[1])
    return confirm_sampling(*parts, *links(2), *coins)


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_chains_of_any_length_are_confirmed(drafts: int, sampling: bool) -> None:
    result = judge(two_chains(drafts), sampling)
    assert result.confirmed.tolist() == [drafts] * 2
    assert result.accepted.tolist() == [drafts + 1] * 2
    assert result.next_token.tolist() == [5, 5]


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_drafts": torch.tensor([5, 3], dtype=torch.int32)}, r"num_drafts.*got 5.* 0 .*3"),
        ({"num_drafts": torch.tensor([3, -1], dtype=torch.int32)}, r"num_drafts.*got -1.* 0 .*3"),
        ({"num_drafts": torch.tensor([3], dtype=torch.int32)}, r"num_drafts: got .*1.*expected"),
        ({"told": torch.ones(2, 2, dtype=torch.int64)}, r"chain_\w+: got .*2, 2.*expected"),
        ({"told": torch.ones(1, 3, dtype=torch.int64)}, r"chain_\w+: got .*1, 3.*expected"),
        ({"chain": torch.ones(4, dtype=torch.int64)[None, :0]}, r"chain: got .*expected"),
        ({"chain": torch.ones(3, 4, dtype=torch.int64)}, r"chain: got .*3, 4.*expected"),
    ],
)
def test_wrong_chains_are_named(sampling: bool, wrong: dict, message: str) -> None:
    with pytest.raises(NworError, match=message):
        judge({**two_chains(3), **wrong}, sampling)


def test_probabilities_of_another_vocabulary_are_named() -> None:
    given = two_chains(3)
    narrow, wide = (torch.full((2, rows, size), 1 / size) for rows, size in ((3, 7), (2, 8)))
    rest = (given["tokens"], wide, *links(2), torch.rand(2, 4), torch.rand(2, 2), torch.rand(2))
    with pytest.raises(NworError, match=r"target_probs: got \[2, 2, 8\], expected .*, 7\]"):
        confirm_sampling(given["chain"], narrow, None, given["num_drafts"], *rest)
