"""The number of rows: found on made-up machines with made-up drafters."""

from __future__ import annotations

import random

import pytest

from nwor_specpv.drafters import TreeConfig
from nwor_specpv.transformers.row_chooser import SIZES, RowChooser

# Seconds of a step by rows: a CPU whose cost grows early, and a GPU where rows are nearly free.
CPU = dict(zip(SIZES, (0.030, 0.033, 0.037, 0.047, 0.060, 0.072, 0.100, 0.130), strict=True))
GPU = {rows: 0.010 + 0.00002 * rows for rows in SIZES}
TOKENS = dict(zip(SIZES, (1.0, 2.1, 2.6, 2.9, 3.1, 3.3, 3.5, 3.7), strict=True))


def simulate(
    seed: int, costs: dict[int, float], tokens: dict[int, float], *, held_up: float = 0.0
) -> list[int]:
    """Sizes chosen over 400 steps. A step that is held up takes two to twelve times as long."""
    rng = random.Random(seed)
    chooser = RowChooser(costs)
    chosen = []
    for _ in range(400):
        rows = chooser.choose(TreeConfig(), (1, False), 1).rows
        seconds = cost(costs, rows)
        if rng.random() < held_up:
            seconds *= rng.uniform(2, 12)
        got = tokens[rows] if tokens[rows] == 1 else max(1.0, rng.gauss(tokens[rows], 0.8))
        chooser.note(rows, (1, False), got, seconds)
        chosen.append(rows)
    return chosen


def cost(costs: dict[int, float], rows: int) -> float:
    return costs[rows] + (0.006 if rows > 1 else 0.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("held_up", [0.0, 0.3])
@pytest.mark.parametrize("costs", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_size_that_pays_is_found_also_on_a_busy_machine(
    costs: dict[int, float], held_up: float, seed: int
) -> None:
    rates = {rows: TOKENS[rows] / cost(costs, rows) for rows in SIZES}
    later = simulate(seed, costs, TOKENS, held_up=held_up)[200:]
    assert sum(rates[rows] for rows in later) / len(later) > 0.8 * max(rates.values())


def test_useless_drafts_end_in_plain_decoding() -> None:
    later = simulate(1, CPU, dict.fromkeys(SIZES, 1.0))[200:]
    assert later.count(1) > 150


def test_a_drafter_that_misses_at_first_is_asked_again() -> None:
    # Drafting so dear that three misses speak against it; afterwards it pays all the same.
    chooser, drafted, later = RowChooser(CPU), 0, []
    for step in range(160):
        rows = chooser.choose(TreeConfig(), (1, False), 1).rows
        drafted += rows > 1
        tokens = TOKENS[rows] if drafted > 3 else 1.0
        chooser.note(rows, (1, False), tokens, CPU[rows] + (0.02 if rows > 1 else 0.0))
        if step >= 80:
            later.append(rows)
    assert later.count(1) < 40


def chain(rng: random.Random, rows: int, right: float) -> int:
    """Tokens of a step with a chain whose every draft is right with that probability."""
    run = 1
    while run < rows and rng.random() < right:
        run += 1
    return run


@pytest.mark.parametrize("seed", range(5))
def test_chains_learn_from_each_other_when_a_text_becomes_easier_or_harder(seed: int) -> None:
    """Rows that pay while drafts are right, and dear enough not to while they are wrong."""
    costs = {rows: 0.030 * (1 + 0.02 * rows) if rows <= 5 else 1.0 for rows in SIZES}
    rng, chooser, chosen = random.Random(seed), RowChooser(costs), []
    for step in range(300):
        rows = chooser.choose(TreeConfig(), (1, False), 1).rows
        run = chain(rng, rows, 0.95 if 100 <= step < 200 else 0.3)
        seconds = costs[rows] + 0.003 * (rows - 1)
        chooser.note(rows, (1, False), run, seconds, [run])
        chosen.append(rows)
    assert chosen[130:200].count(5) > 50
    assert chosen[240:].count(5) < 20


def test_what_a_chain_gives_counts_for_the_others() -> None:
    chooser, here = RowChooser(CPU), (2, False)
    chooser.note(5, here, 4.5, 0.05, [5, 4])  # eight drafts, of which one was wrong
    chooser.note(3, here, 1.0, 0.04, [1, 1])  # two more
    arms = chooser._arms[here]
    assert arms[5].tokens == pytest.approx((4.5 + 1.0) / 2)  # it would have failed as early
    chooser.note(3, here, 2.5, 0.04, [3, 2])  # and four, of which three are right
    right = (7 + 0 + 3) / (8 + 2 + 4)  # but for the weight of the latest
    gone_on = right + right**2
    assert arms[5].tokens == pytest.approx((4.5 + 1.0 + (3 + gone_on + 2) / 2) / 3, abs=0.15)
    assert arms[3].tokens == pytest.approx((1.0 + 2.5) / 2)
    chooser.note(5, here, 4.0, 0.05, [5, 3])
    assert arms[3].tokens == pytest.approx((1.0 + 2.5 + 3.0) / 3)
    assert (arms[3].tries, arms[5].tries) == (2, 2)
    chooser.note(8, here, 4.0, 0.06, [4, 4])  # a tree's tokens say nothing about chains
    assert arms[3].tokens == pytest.approx((1.0 + 2.5 + 3.0) / 3)


def test_depth_and_breadth_follow_the_rows() -> None:
    chooser = RowChooser(CPU)
    tree = TreeConfig(depth=6, top_k=4)
    assert chooser.shape(tree, 5) == TreeConfig(5, 4, 1)
    assert chooser.shape(tree, 12) == TreeConfig(12, 6, 4)
    assert chooser.cost(10) == pytest.approx((0.047 + 0.060) / 2)
    assert chooser.cost(64) == pytest.approx(0.260)


def test_a_curve_measured_on_a_busy_machine_does_not_end_drafting() -> None:
    wrong = {rows: 0.030 * (1 if rows == 1 else 12) for rows in SIZES}
    chooser, later = RowChooser(wrong), []
    for step in range(120):
        rows = chooser.choose(TreeConfig(), (1, False), 1).rows
        chooser.note(rows, (1, False), TOKENS[rows], cost(CPU, rows))
        if step >= 60:
            later.append(rows)
    assert later.count(1) < 20
