"""How many rows trees have by what steps took: in made-up worlds, and in the plan of a step."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from nwor_specpv.arms import PLAIN, Arm
from nwor_specpv.vllm.tree.decisions import TreeDecisions
from nwor_specpv.vllm.tree.shape import ARM_ROWS, MOST_ROWS, shape_of
from tests.python.vllm.arm_worlds import Engine, Run, World

CHAIN = Arm(ARM_ROWS[0] - 1, 0)
ROOM = 4096


@dataclass(frozen=True)
class TreeWorld(World):
    """A head that grows trees. `guess`: how often the likeliest token is right; each further row of
    a level is right a fifth as often as the one before."""

    batch: int = 1
    row: float = 0.002  # share of a plain step, for each further row of the batch
    level: float = 0.05  # share of it, for each level of a tree

    def seconds(self, arm: Arm, scale: float = 1.0) -> float:
        levels = shape_of(1 + arm.drafts).depth if arm.drafts else 0
        share = 1 + self.row * arm.drafts * self.batch + self.level * levels
        return self.plain * scale * share

    def survival(self, arm: Arm) -> list[float]:
        if not arm.drafts:
            return []
        depth = shape_of(1 + arm.drafts).depth
        missed, breadth, chance = 1.0, arm.drafts / depth, self.guess
        while breadth > 0:
            missed -= min(1.0, breadth) * chance
            breadth, chance = breadth - 1, chance / 5
        return [min(0.98, 1 - max(0.0, missed))] * depth

    __hash__ = World.__hash__


WORLDS = {
    "one request": TreeWorld(guess=0.6),
    "four": TreeWorld(guess=0.55, batch=4),
    "a chain pays": TreeWorld(guess=0.6, batch=32, row=0.006),
    "nothing is right": TreeWorld(guess=0.03, batch=4),
    "rows are dear": TreeWorld(guess=0.3, batch=64, row=0.02),
}
ALL = pytest.mark.parametrize("name", WORLDS)


def serve(engine: Engine, world: TreeWorld, steps: int) -> Run:
    return engine.serve(world, steps, batch=lambda _: world.batch)


class Chosen:
    """The choice of `TreeDecisions` as a made-up engine asks for it."""

    def __init__(self) -> None:
        self.decisions = TreeDecisions(ROOM)
        self.observe, self.arms = self.decisions.choice.observe, self.decisions.choice.arms

    def choose(self, batch: int, context: float, *, passes: bool):
        return self.decisions.choose(batch, context, round(context), measurable=True)


def of_chain(world: TreeWorld, run: Run) -> float:
    """What was served, against the smallest trees alone."""
    return run.of_plain * world.rate(PLAIN) / world.rate(CHAIN)


def possible(world: TreeWorld) -> list[Arm]:
    rows = [rows for rows in ARM_ROWS if rows == ARM_ROWS[0] or rows * world.batch <= MOST_ROWS]
    return [PLAIN, *(Arm(number - 1, 0) for number in rows)]


def test_the_worlds_are_what_their_names_say() -> None:
    best = {name: max(possible(world), key=world.rate) for name, world in WORLDS.items()}
    assert best["nothing is right"] == best["rows are dear"] == PLAIN
    assert best["a chain pays"] == CHAIN
    assert best["one request"] == Arm(31, 0)
    assert best["four"] == Arm(15, 0)


@ALL
@pytest.mark.parametrize("late", [False, True])
def test_neither_plain_steps_nor_chains_are_undercut(name: str, late: bool) -> None:
    world, engine = WORLDS[name], Engine(Chosen(), seed=1, late=late, rests=False)
    serve(engine, world, 500)
    run = serve(engine, world, 3000)
    assert run.of_plain > 0.97
    assert of_chain(world, run) > 0.97
    best = max(possible(world), key=world.rate)
    assert run.of_plain * world.rate(PLAIN) / world.rate(best) > 0.95
    assert run.taken.keys() <= set(possible(world))


@ALL
def test_noise_and_dear_first_steps(name: str) -> None:
    world = dataclasses.replace(WORLDS[name], noise=0.1, outliers=0.02, first=0.1)
    engine = Engine(Chosen(), seed=2, rests=False)
    serve(engine, world, 1500)
    run = serve(engine, world, 4000)
    assert run.of_plain > 0.97
    assert of_chain(world, run) > 0.97


def test_a_change_for_the_worse_is_noticed() -> None:
    engine, world = Engine(Chosen(), seed=3, rests=False), WORLDS["four"]
    serve(engine, world, 2000)
    bad = dataclasses.replace(world, guess=0.02)
    assert serve(engine, bad, 120).taken[PLAIN] > 60
    assert serve(engine, bad, 2000).of_plain > 0.97


def test_batches_that_change_have_trees_that_fit() -> None:
    engine, sizes = Engine(Chosen(), seed=4, rests=False), random.Random(4)
    choose, asked = engine.choice.choose, []

    def choosing(batch: int, *args: object, **more: object):
        found = choose(batch, *args, **more)
        asked.append((batch, found.arm))
        return found

    engine.choice.choose = choosing
    engine.serve(WORLDS["one request"], 4000, batch=lambda _: sizes.choice([1, 3, 20, 200, 2000]))
    for batch, arm in asked:
        rows = batch * (1 + arm.drafts)
        assert arm == PLAIN or rows <= ROOM
        assert arm in (PLAIN, CHAIN) or rows <= MOST_ROWS
    assert {arm for batch, arm in asked if batch == 2000} == {PLAIN}
    assert any(arm == CHAIN for batch, arm in asked if batch == 200)


def test_the_plan_of_a_step_says_the_drafts() -> None:
    decisions = TreeDecisions(ROOM)
    request = SimpleNamespace(num_computed_tokens=10, num_tokens=11, num_output_placeholders=0)
    found = []
    for step in range(200):
        output = SimpleNamespace(
            num_scheduled_tokens={"a": 1},
            total_num_scheduled_tokens=1,
            scheduled_spec_decode_tokens={},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=[10]),
        )
        arm = decisions.decide(output, {"a": request}, 0.01 * step)
        assert output.num_spec_tokens_to_schedule == arm.drafts
        assert output.nwor_specpv_passes == 0
        found.append(arm)
        decisions.finish(output, [[5]], 0.01 * step + 0.01)
    assert found[0] == PLAIN
    assert CHAIN in found
    assert decisions.name(Arm(15, 0)) == "trees of 16 rows"
    assert decisions.name(PLAIN) == "plain"
