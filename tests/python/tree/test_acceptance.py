"""Acceptance against walks over lists in exact fractions, on random trees."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from nwor_specpv import (
    accept_chain_sampling,
    accept_greedy,
    accept_sampling,
    make_coins,
)
from tests.python.tree.forest import (
    DEVICES,
    SEED,
    Fractions,
    chain_walk,
    draw,
    greedy_walk,
    links_of,
    random_parents,
    random_probs,
    sampling_walk,
)


def batch_links(forest: list[list[int]], device: str) -> list[torch.Tensor]:
    parts = zip(*(links_of(parents) for parents in forest), strict=True)
    return [torch.tensor(part, dtype=torch.int32, device=device) for part in parts]


def assert_accepted(outcome, expected: list[tuple[list[int], int]], rows: int) -> None:
    path, counts, following = outcome
    assert (path.dtype, counts.dtype, following.dtype) == (torch.int32, torch.int32, torch.int64)
    assert counts.tolist() == [len(rows) for rows, _ in expected]
    assert path.tolist() == [taken + [-1] * (rows - len(taken)) for taken, _ in expected]
    assert following.tolist() == [token for _, token in expected]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 2, 9, 64, 65, 256])
def test_greedy_follows_the_argmax(device: str, rows: int) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED + rows)
    forest = [random_parents(rows, rng) for _ in range(6)]
    tokens = [[rng.randrange(3) for _ in range(rows)] for _ in forest]
    targets = [[rng.randrange(3) for _ in range(rows)] for _ in forest]
    if rows > 1:
        targets[0][0] = tokens[0][1]  # whatever the seed, something is accepted
    expected = [greedy_walk(*one) for one in zip(forest, tokens, targets, strict=True)]
    assert rows == 1 or expected[0][0]
    given = (torch.tensor(tokens, device=device), torch.tensor(targets, device=device))
    status = torch.full((6,), 5, device=device)
    outcome = accept_greedy(*given, *batch_links(forest, device), status=status)
    assert_accepted(outcome, expected, rows)
    assert status.tolist() == [0] * 6
    halves = (given[0].int(), given[1].int().t().contiguous().t())
    assert_accepted(accept_greedy(*halves, *batch_links(forest, device)), expected, rows)


def random_call(rows: int, vocabulary: int, batch: int, rng: random.Random):
    forest = [random_parents(rows, rng) for _ in range(batch)]
    probs = torch.stack([random_probs(rows, vocabulary, rng) for _ in forest])
    # Mostly tokens the target finds possible, so that walks go deep; equal siblings happen.
    tokens = []
    for b, parents in enumerate(forest):
        row = [0] * rows
        for i in range(1, rows):
            likely = torch.argsort(probs[b, parents[i]], descending=True)[:3].tolist()
            row[i] = rng.choice(likely) if rng.random() < 0.8 else rng.randrange(vocabulary)
        tokens.append(row)
    coins = torch.tensor([[rng.random() * 0.9 for _ in range(rows)] for _ in forest])
    final = torch.tensor([rng.random() for _ in forest])
    return forest, tokens, probs, coins, final


@pytest.mark.parametrize("device", DEVICES)
def test_a_coin_at_the_end_of_a_piece_belongs_to_the_next(device: str) -> None:
    """Pieces of the mass are half open: [0, 1/4) is the first child's, [1/4, 3/4) the second's."""
    probs = torch.tensor([[0.25, 0.5, 0.125, 0.125]], device=device).expand(1, 3, 4)
    links = batch_links([[-1, 0, 0]], device)
    tokens = torch.tensor([[3, 0, 1]], device=device)
    below = 0.25 - 2.0**-26  # the next float32
    cases = [(0.0, [1]), (below, [1]), (0.25, [2]), (0.5, [2]), (0.75, []), (1.0, [])]
    for coin, taken in cases:
        coins = torch.tensor([[coin, 0.0, 0.0]], device=device)
        final = torch.tensor([0.0], device=device)
        path, counts, _ = accept_sampling(tokens, probs, *links, coins, final)
        assert path[0, : int(counts[0])].tolist() == taken, coin


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(1, 1), (2, 5), (12, 30), (64, 1023), (65, 1025), (30, 5000), (256, 9)]
)
def test_sampling_follows_the_rule(device: str, rows: int, vocabulary: int) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED + rows + vocabulary)
    batch = 5 if rows * vocabulary > 20000 else 12
    forest, tokens, probs, coins, final = random_call(rows, vocabulary, batch, rng)
    expected = [
        sampling_walk(
            forest[b],
            tokens[b],
            Fractions(probs[b]),
            [Fraction(c) for c in coins[b].tolist()],
            Fraction(final[b].item()),
        )
        for b in range(batch)
    ]
    # As torch lays it out, with the vocabulary first, and in a larger table at an odd offset.
    inner = torch.full((batch, rows + 1, vocabulary + 3), float("nan"))
    inner[:, :rows, 1 : vocabulary + 1] = probs
    for table in (
        probs.to(device),
        probs.permute(2, 0, 1).contiguous().to(device).permute(1, 2, 0),
        inner.to(device)[:, :rows, 1 : vocabulary + 1],
    ):
        status = torch.full((batch,), 5, device=device)
        outcome = accept_sampling(
            torch.tensor(tokens, device=device),
            table,
            *batch_links(forest, device),
            coins.to(device),
            final.to(device),
            status=status,
        )
        assert_accepted(outcome, expected, rows)
        assert status.tolist() == [0] * batch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_draft", [True, False])
@pytest.mark.parametrize("vocabulary", [4, 1500])
def test_chains_follow_leviathans_rule(device: str, with_draft: bool, vocabulary: int) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED + vocabulary)
    batch, rows = (16, 6) if vocabulary < 100 else (5, 4)
    probs = torch.stack([random_probs(rows, vocabulary, rng) for _ in range(batch)])
    drafts = torch.stack([random_probs(rows, vocabulary, rng) for _ in range(batch)])
    drafts = 0.5 * drafts + 0.5 * probs
    counts = [rows - 1, *(rng.randrange(rows) for _ in range(batch - 1))]
    tokens, expected = [], []
    coins = torch.tensor([[rng.random() * 0.8 for _ in range(rows)] for _ in range(batch)])
    coins[0] = 0.0
    final = torch.tensor([rng.random() for _ in range(batch)])
    for b in range(batch):
        p, q = Fractions(probs[b]), Fractions(drafts[b])
        row = [0] + [draw(q[i], Fraction(rng.random())) for i in range(counts[b])]
        if b == 0:  # whatever the seed, something is accepted
            row[1:] = [int(probs[0, i].argmax()) for i in range(counts[0])]
        if not with_draft:
            q = [[Fraction(int(t == token)) for t in range(vocabulary)] for token in row[1:]]
        coin = [Fraction(c) for c in coins[b].tolist()]
        accepted, token = chain_walk(row, p, q, coin, Fraction(final[b].item()))
        expected.append((list(range(1, accepted + 1)), token))
        tokens.append(row + [-7] * (rows - len(row)))
    tables = [None]
    if with_draft:
        tables = [drafts[:, :-1].to(device), drafts.to(device)]
    for table in tables:
        outcome = accept_chain_sampling(
            torch.tensor(tokens, device=device),
            probs.to(device),
            table,
            coins.to(device),
            final.to(device),
            num_drafts=torch.tensor(counts, dtype=torch.int32, device=device),
        )
        assert_accepted(outcome, expected, rows)
    assert expected[0][0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_chain_without_draft_probabilities_is_a_tree(device: str) -> None:
    rng = random.Random(SEED)
    _, tokens, probs, coins, final = random_call(5, 40, 8, rng)
    links = batch_links([list(range(-1, 4))] * 8, device)
    given = (torch.tensor(tokens, device=device), probs.to(device))
    chain = accept_chain_sampling(*given, None, coins.to(device), final.to(device))
    tree = accept_sampling(*given, *links, coins.to(device), final.to(device))
    for one, other in zip(chain, tree, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_thresholds_accept_more(device: str) -> None:
    parents, tokens = [[-1, 0, 0]], torch.tensor([[0, 1, 2]], device=device)
    probs = torch.tensor([[[0.4, 0.25, 0.35]] * 3], device=device)
    links = batch_links(parents, device)
    coins = torch.tensor([[0.9, 0.0, 0.0]], device=device)
    final = torch.tensor([0.5], device=device)

    def run(**thresholds) -> list[int]:
        path, *_ = accept_sampling(tokens, probs, *links, coins, final, **thresholds)
        return path[0].tolist()

    assert run() == [-1, -1, -1]
    assert run(threshold_single=0.3) == [2, -1, -1]
    assert run(threshold_single=0.2) == [1, -1, -1]
    assert run(threshold_acc=0.5) == [2, -1, -1]  # 0.45 is within 0.25 + 0.35
    assert run(threshold_acc=0.2) == [1, -1, -1]
    probs[0, 0] = torch.tensor([0.6, 0.0, 0.4])
    assert run(threshold_single=0.01, threshold_acc=1e-6) == [2, -1, -1]  # never the impossible


# ---- seeds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_coins_depend_on_seed_and_position_alone(device: str) -> None:
    seeds = torch.tensor([5, -3, 5, 2**62, 5], device=device)
    places = torch.tensor([10, 10, 12, 2**40, 10], device=device)
    coins, final = make_coins(seeds, places, 6)
    assert (coins.shape, final.shape, coins.dtype) == ((5, 6), (5,), torch.float32)
    assert ((coins >= 0) & (coins < 1)).all()
    assert torch.equal(coins[0], coins[4])
    assert final[0] == final[4]
    assert torch.equal(coins[0, 2:], coins[2, :4])  # the same positions, from a later round
    assert len(set(coins[[0, 1, 3]].flatten().tolist())) == 18
    alone = make_coins(seeds[2:3], places[2:3], 6)
    assert torch.equal(alone[0][0], coins[2])
    host = make_coins(seeds.cpu(), places.cpu(), 6)
    assert torch.equal(host[0], coins.cpu())
    assert torch.equal(host[1], final.cpu())


def test_coins_are_even() -> None:
    coins, final = make_coins(torch.arange(400), torch.zeros(400, dtype=torch.int64), 250)
    values = torch.cat([coins.flatten(), final]).double()
    assert abs(values.mean() - 0.5) < 0.005
    seen = torch.histc(values.float(), bins=100, min=0, max=1)
    assert ((seen - len(values) / 100).abs() < 6 * (len(values) / 100) ** 0.5).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_seed_gives_its_tokens_whatever_the_batch(device: str) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    batch, rows, vocabulary = 9, 16, 4100
    forest, tokens, probs, _, _ = random_call(rows, vocabulary, batch, rng)
    seeds = torch.tensor([rng.randrange(2**63) for _ in range(batch)], device=device)
    places = torch.tensor([rng.randrange(10**5) for _ in range(batch)], device=device)

    def run(members: list[int]):
        coins = make_coins(seeds[members], places[members], rows)
        return accept_sampling(
            torch.tensor(tokens, device=device)[members],
            probs.to(device)[members],
            *(part[members] for part in batch_links(forest, device)),
            *coins,
        )

    everyone = run(list(range(batch)))
    for members in ([3], [8, 3, 0], rng.sample(range(batch), batch)):
        for part, whole in zip(run(members), everyone, strict=True):
            assert torch.equal(part, whole[members])
