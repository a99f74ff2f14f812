"""The number of rows: found on made-up machines with made-up drafters, never far below plain."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from nwor_specpv.drafters import TreeConfig
from nwor_specpv.transformers.rows.chooser import SIZES, RowChooser

# Seconds of a step by rows: a CPU whose cost grows early, and a GPU where rows are nearly free.
CPU = dict(zip(SIZES, (0.030, 0.033, 0.037, 0.047, 0.060, 0.072, 0.100, 0.130), strict=True))
GPU = {rows: 0.010 + 0.00002 * rows for rows in SIZES}
DEPTH = 5


@dataclass
class Machine:
    """A pass by its rows, attention over a long context by its rows, and drafting."""

    costs: dict[int, float]
    attention: float = 0.0  # seconds of one row of one request
    drafting: float = 0.006
    noise: float = 0.03
    held_up: float = 0.0  # share of steps that take two to twelve times as long

    def seconds(self, rows: int, batch: int) -> float:
        passed = RowChooser(self.costs).cost(rows * batch)
        seen = self.attention * batch * (1 + 0.3 * (rows - 1))
        return passed + seen + (self.drafting if rows > 1 else 0.0)


@dataclass
class Run:
    rows: list[int] = field(default_factory=list)
    seconds: float = 0.0
    tokens: float = 0.0
    plain: float = 0.0  # seconds of one token without drafts

    @property
    def of_plain(self) -> float:
        return self.tokens * self.plain / self.seconds


def simulate(
    machine: Machine,
    right: Callable[[int], float],
    *,
    seed: int = 0,
    batch: int = 1,
    steps: int = 400,
    chooser: RowChooser | None = None,
) -> Run:
    """Drafts of step i are right with the probability `right(i)`, each if the one before is."""
    rng, run = random.Random(seed), Run(plain=machine.seconds(1, batch))
    chooser = chooser or RowChooser(machine.costs)
    for step in range(steps):
        tree, choice = chooser.choose(TreeConfig(depth=DEPTH), batch, 1000 + step)
        tokens = []
        for _ in range(batch):
            count = 1
            while count < min(tree.rows, DEPTH + 1) and rng.random() < right(step):
                count += 1
            tokens.append(count)
        seconds = machine.seconds(tree.rows, batch) * rng.lognormvariate(0, machine.noise)
        if rng.random() < machine.held_up:
            chooser.note(choice, seconds * rng.uniform(2, 12), tokens)  # of another's work
        else:
            chooser.note(choice, seconds, tokens)
        run.rows.append(tree.rows)
        run.seconds += seconds
        run.tokens += sum(tokens) / batch
    return run


def best_rate(machine: Machine, right: float, batch: int) -> float:
    """Relative to plain decoding."""
    tokens = {rows: sum(right**i for i in range(min(rows, DEPTH + 1))) for rows in SIZES}
    plain = machine.seconds(1, batch)
    return max(tokens[rows] * plain / machine.seconds(rows, batch) for rows in SIZES)


@pytest.mark.parametrize(("steps", "least"), [(40, 0.965), (800, 0.97)])
@pytest.mark.parametrize("batch", [1, 4, 8])
@pytest.mark.parametrize("right", [0.0, 0.15, 0.3])
@pytest.mark.parametrize(
    "machine",
    [Machine(CPU), Machine(CPU, attention=0.02), Machine(GPU), Machine(CPU, drafting=0.02)],
    ids=["cpu", "long context", "gpu", "dear drafts"],
)
def test_drafts_that_do_not_pay_cost_next_to_nothing(
    machine: Machine, right: float, batch: int, steps: int, least: float
) -> None:
    """Also in the first call of a process, and if it is short."""
    runs = [
        simulate(machine, lambda _: right, seed=seed, batch=batch, steps=steps)
        for seed in range(4000 // steps)
    ]
    assert sum(run.tokens * run.plain for run in runs) > least * sum(run.seconds for run in runs)


@pytest.mark.parametrize("held_up", [0.0, 0.1])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("right", [0.6, 0.85])
@pytest.mark.parametrize("costs", [CPU, GPU], ids=["cpu", "gpu"])
def test_the_size_that_pays_is_found_also_on_a_busy_machine(
    costs: dict[int, float], right: float, batch: int, held_up: float
) -> None:
    machine = Machine(costs, held_up=held_up)
    runs = [simulate(machine, lambda _: right, seed=seed, batch=batch) for seed in range(5)]
    reached = sum(run.of_plain for run in runs) / len(runs)
    assert reached > 0.85 * best_rate(machine, right, batch)
    assert reached > 0.97


def test_useless_drafts_end_in_plain_decoding() -> None:
    assert simulate(Machine(CPU), lambda _: 0.0).rows[100:].count(1) > 280


@pytest.mark.parametrize("seed", range(5))
def test_a_text_that_becomes_easier_or_harder_is_noticed(seed: int) -> None:
    run = simulate(
        Machine(CPU), lambda step: 0.95 if 200 <= step < 500 else 0.05, seed=seed, steps=700
    )
    assert run.rows[400:500].count(1) < 50
    assert run.rows[560:].count(1) > 110


def test_what_was_learnt_serves_the_next_call() -> None:
    machine = Machine(CPU)
    chooser = RowChooser(CPU)
    simulate(machine, lambda _: 0.85, chooser=chooser)
    again = simulate(machine, lambda _: 0.85, chooser=chooser, steps=40, seed=1)
    assert again.of_plain > 0.85 * best_rate(machine, 0.85, 1)


def test_views_are_learnt_for_themselves() -> None:
    chooser = RowChooser(CPU)
    simulate(Machine(CPU), lambda _: 0.85, chooser=chooser)
    full, _ = chooser.choose(TreeConfig(depth=DEPTH), 1, 1200)
    viewed, _ = chooser.choose(TreeConfig(depth=DEPTH), 1, 1200, viewing=True)
    assert full.rows > 1
    assert viewed.rows == 1


def test_the_choice_is_the_same_for_the_same_times() -> None:
    runs = [simulate(Machine(CPU), lambda _: 0.6, seed=3) for _ in range(2)]
    assert runs[0] == runs[1]


def test_depth_and_breadth_follow_the_rows() -> None:
    chooser = RowChooser(CPU)
    tree = TreeConfig(depth=6, top_k=4)
    assert chooser.shape(tree, 5) == TreeConfig(5, 4, 1)
    assert chooser.shape(tree, 12) == TreeConfig(12, 6, 4)
    assert chooser.cost(10) == pytest.approx((0.047 + 0.060) / 2)
    assert chooser.cost(64) == pytest.approx(0.260)


def test_sizes_that_cannot_pay_are_never_tried() -> None:
    dear = {rows: 0.030 * rows for rows in SIZES}
    assert set(simulate(Machine(dear), lambda _: 1.0).rows) <= {1, 3}


def test_a_curve_measured_on_a_busy_machine_does_not_end_drafting() -> None:
    wrong = {rows: 0.030 * (1 if rows == 1 else 12) for rows in SIZES}
    run = simulate(Machine(CPU), lambda _: 0.85, chooser=RowChooser(wrong), steps=400)
    assert run.rows[300:].count(1) < 20
