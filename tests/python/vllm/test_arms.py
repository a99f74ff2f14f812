"""The choice between plain steps, guesses and partial passes, in made-up worlds."""

from __future__ import annotations

import dataclasses
import random

import pytest

from nwor_specpv.arms import PLAIN, Arm, ArmChoice, make_arms
from nwor_specpv.arms.estimates import Estimate
from nwor_specpv.vllm.scheduling.step_clock import StepClock
from tests.python.vllm.arm_worlds import GUESSES, LIMIT, Engine, MeasuredWorld, World

WORLDS = {
    "plain": World(pass_=0.9, row=0.1, agreement=0.4, guess=0.1),
    "nothing stands": World(pass_=1.5, row=0.2, agreement=0.1, guess=0.02, per_pass=1),
    "passes": World(pass_=0.15, row=0.01),
    "many passes": World(pass_=0.4, row=0.02, agreement=0.97),
    "guesses": World(pass_=0.9, row=0.02, agreement=0.7, guess=0.7),
    "few passes": World(pass_=0.5, row=0.03, agreement=0.85, guess=0.4),
    "copies": World(pass_=0.9, row=0.02, agreement=0.95, guess=0.95),
}
ALL = pytest.mark.parametrize("name", WORLDS)


def of(name: str, **more: float) -> World:
    return dataclasses.replace(WORLDS[name], **more)


def test_the_worlds_are_what_their_names_say() -> None:
    arms = make_arms(LIMIT, GUESSES, long_guesses=True)
    assert arms[:4] == [PLAIN, Arm(GUESSES, 0), Arm(LIMIT, 0), Arm(LIMIT // 2, 1)]
    assert [arm.passes for arm in arms[3:]] == [1, 2, 3, 4, 6, 8, 12]
    assert [arm.drafts for arm in arms[3:]] == [8, 8, *[16] * 5]
    assert make_arms(LIMIT, GUESSES) == arms[:2] + arms[3:]
    best = {name: max(arms, key=world.rate) for name, world in WORLDS.items()}
    assert best["plain"] == best["nothing stands"] == PLAIN
    assert best["guesses"] == Arm(GUESSES, 0)
    assert best["copies"] == Arm(LIMIT, 0)
    assert [best[name].passes for name in ("few passes", "passes", "many passes")] == [2, 4, 6]


@ALL
@pytest.mark.parametrize("late", [False, True])
def test_the_best_arm_is_found_and_plain_is_not_undercut(name: str, late: bool) -> None:
    engine = Engine(seed=1, late=late)
    start, rest = engine.serve(of(name), 500), engine.serve(of(name), 4000)
    assert start.of_plain > 0.94  # about 25 steps' worth are spent at first
    assert rest.of_plain > 0.97
    assert rest.of_best > 0.97
    assert (start.plain + rest.plain) / (start.seconds + rest.seconds) > 0.97


@ALL
@pytest.mark.parametrize("first", [0.1, 3.0])
def test_the_first_step_of_an_arm_is_slow(name: str, first: float) -> None:
    """It says nothing about the arm, and other arms are tried soon all the same."""
    engine = Engine(seed=8)
    engine.serve(of(name, first=first), 1000)
    rest = engine.serve(of(name, first=first), 2000)
    assert rest.of_best > 0.96


@ALL
def test_noise_and_outliers(name: str) -> None:
    engine = Engine(seed=2)
    run = engine.serve(of(name, noise=0.1, outliers=0.02), 6000)
    assert run.of_plain > 0.97
    assert run.of_best > 0.95
    rest = engine.serve(of(name, noise=0.1, outliers=0.02), 6000)
    assert rest.of_best > 0.97


@ALL
def test_one_request(name: str) -> None:
    """Tokens of a step say little: it takes longer to tell arms apart that are nearly alike."""
    engine = Engine(seed=3)
    run = engine.serve(of(name), 12000, batch=lambda _: 1)
    assert run.of_plain > 0.97
    assert run.of_best > 0.94


SLOW_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3)]


@pytest.mark.parametrize("seed", [1, *SLOW_SEEDS])
def test_the_workload_changes(seed: int) -> None:
    engine = Engine(seed=seed)
    for name in ("plain", "passes", "guesses", "many passes", "plain", "guesses", "few passes"):
        change = engine.serve(of(name), 4000)  # it takes about as long to see that passes pay
        run = engine.serve(of(name), 4000)
        assert min(change.of_plain, run.of_plain) > 0.97, name
        assert run.of_best > 0.97, name


def test_a_change_for_the_worse_is_noticed_at_once() -> None:
    engine = Engine(seed=4)
    engine.serve(of("many passes"), 3000)
    run = engine.serve(of("nothing stands"), 40)
    assert run.taken[PLAIN] > 15
    assert sum(number for arm, number in run.taken.items() if arm.passes) < 20
    assert engine.serve(of("nothing stands"), 4000).of_plain > 0.97


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("plain", [3.0e-3, 3.85e-3])
def test_other_guesses_promise_less_after_a_change_for_the_worse(plain: float, late: bool) -> None:
    """Times and tokens of Qwen2.5-Coder-0.5B on an H200, 96 requests of 2048 tokens: other texts
    come, and no number of guesses pays."""
    few, many = Arm(GUESSES, 0), Arm(LIMIT, 0)
    good = MeasuredWorld(
        plain, measured=((PLAIN, plain, 1), (few, 4.8e-3, 2.6), (many, 6.3e-3, 3.0))
    )
    bad = MeasuredWorld(
        plain, measured=((PLAIN, plain, 1), (few, 4.6e-3, 1.15), (many, 5.3e-3, 1.25))
    )
    shape = {"batch": lambda _: 96, "context": lambda _: 2048.0, "passes": False}
    runs = []
    for seed in range(8):
        engine = Engine(seed=seed, late=late)
        assert engine.serve(good, 200, **shape).of_plain > 1.3
        runs.append(engine.serve(bad, 110, **shape))
    assert sum(run.of_plain for run in runs) / len(runs) > 0.945
    assert sum(run.taken.get(many, 0) for run in runs) / len(runs) < 16


@pytest.mark.parametrize("slow", [1.65, 1 / 1.65])
def test_what_slows_all_steps_is_seen_in_those_that_are_taken(slow: float) -> None:
    """Guesses pay while the host is busy, or is not. Then that ends, and they pay no longer: the
    time of plain steps, which nobody has taken for long, must not be that of another host."""
    few, many = Arm(GUESSES, 0), Arm(LIMIT, 0)
    good = MeasuredWorld(3.1e-3, measured=((few, 4.6e-3, 2.4), (many, 6.1e-3, 5.0)))
    bad = MeasuredWorld(3.1e-3, measured=((few, 4.6e-3, 1.45), (many, 6.0e-3, 1.62)))
    shape = {"batch": lambda _: 96, "context": lambda _: 1500.0, "passes": False}
    runs = []
    for seed in range(10):
        engine = Engine(seed=seed)
        for world, steps in ((good, 300), (bad, 60), (good, 200)):
            engine.serve(world, steps, slow=slow, **shape)
        runs.append(engine.serve(bad, 100, **shape))
    assert sum(run.of_plain for run in runs) / len(runs) > 0.925


def test_what_is_foreseen_spares_probes_and_hastens_what_pays() -> None:
    """Texts come and go, and guesses pay for some of them only."""
    few, many = Arm(GUESSES, 0), Arm(LIMIT, 0)
    good = MeasuredWorld(3e-3, noise=0.05, measured=((few, 4.6e-3, 2.7), (many, 6.2e-3, 5.4)))
    bad = MeasuredWorld(3e-3, noise=0.05, measured=((few, 4.6e-3, 1.33), (many, 5.9e-3, 1.62)))
    shape = {"batch": lambda _: 96, "context": lambda _: 1500.0, "passes": False}
    found: dict[str, list[float]] = {"good": [], "bad": []}
    for seed in range(10):
        engine = Engine(seed=seed, foresees=True)
        engine.serve(good, 80, **shape)
        for _ in range(3):
            engine.serve(bad, 40, **shape)
            found["bad"].append(engine.serve(bad, 120, **shape).of_plain)
            found["good"].append(engine.serve(good, 60, **shape).of_plain)
    means = {name: sum(of_plain) / len(of_plain) for name, of_plain in found.items()}
    assert means["bad"] > 0.96
    assert means["good"] > 1.8


@ALL
def test_the_batch_changes_in_every_step(name: str) -> None:
    sizes = random.Random(5)
    engine = Engine(seed=5)
    run = engine.serve(
        of(name), 24000, batch=lambda _: sizes.choice([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
    )
    assert run.of_plain > 0.97
    assert run.of_best > 0.93


@ALL
def test_contexts_grow(name: str) -> None:
    engine = Engine(seed=6)
    run = engine.serve(of(name), 6000, context=lambda step: 2000 + 4.0 * step)
    assert run.of_plain > 0.97
    assert run.of_best > 0.96


@ALL
def test_probes_cost_about_a_hundredth(name: str) -> None:
    """In a world that does not change, of what is lost against the best arm after the start."""
    engine = Engine(seed=7)
    engine.serve(of(name), 4000)
    run = engine.serve(of(name), 4000)
    best = of(name).best(engine.choice)
    if best == PLAIN:
        assert 1 - run.of_plain < 0.015
    else:
        assert run.taken.get(PLAIN, 0) < 200


def test_short_contexts_have_no_passes() -> None:
    engine = Engine(seed=8)
    run = engine.serve(of("passes"), 3000, passes=False)
    assert {arm.passes for arm in run.taken} == {0}
    assert run.of_best > 0.97


def test_failed_passes_are_chosen_no_more() -> None:
    engine = Engine(seed=9)
    assert any(arm.passes for arm in engine.serve(of("passes"), 500).taken)
    engine.choice.fail_passes()
    run = engine.serve(of("passes"), 1000)
    assert {arm.passes for arm in run.taken} == {0}
    assert run.of_plain > 1.5  # guesses


def test_the_choice_is_the_same_for_the_same_times() -> None:
    runs = [Engine(seed=10).serve(of("few passes"), 2000) for _ in range(2)]
    assert runs[0] == runs[1]


def test_steps_with_prompts_follow_the_choice_and_try_nothing() -> None:
    engine = Engine(seed=11)
    engine.serve(of("passes"), 2000)
    found = {engine.choice.choose(16, 8192, passes=True, measurable=False).arm for _ in range(100)}
    assert len(found) == 1
    assert found.pop().passes in (3, 4, 6)


def test_one_slow_step_does_not_spoil_an_estimate() -> None:
    for place in range(4):
        found = Estimate()
        for visit in range(4):
            found.add(visit, 1.0 if visit == place else 0.01, [2, 2])
        assert found.seconds == pytest.approx(0.01)
    for visit in range(4, 100):
        found.add(visit, 1.0 if visit % 30 == 0 else 0.01, [2, 2])
    assert found.seconds == pytest.approx(0.01, rel=0.05)
    for visit in range(100, 112):  # a new level
        found.add(visit, 0.03, [2, 2])
    assert found.seconds == pytest.approx(0.03, rel=0.05)


# ---- the clock ----


def steps_of(*arms: Arm) -> tuple[StepClock, list[object], ArmChoice]:
    clock, choice, outputs = StepClock(), ArmChoice(make_arms(LIMIT, GUESSES)), []
    for number, arm in enumerate(arms):
        outputs.append(object())
        chosen = choice.choose(4, 4096, passes=True)._replace(arm=arm)
        clock.scheduled(outputs[-1], chosen, float(number), measurable=True)
    return clock, outputs, choice


def test_a_step_is_what_was_chosen_one_step_before() -> None:
    drafts = Arm(LIMIT, 3)
    clock, outputs, _ = steps_of(PLAIN, drafts)
    assert clock.finished(outputs[0], 10.0) is None
    found = clock.finished(outputs[1], 10.5)
    assert found is not None
    assert found[0].arm == PLAIN
    assert found[1] is None, "the next step chose otherwise"
    clock, outputs, _ = steps_of(drafts, drafts, drafts)
    clock.finished(outputs[0], 10.0)
    found = clock.finished(outputs[1], 10.5)
    assert found is not None
    assert found[0].arm == drafts
    assert found[1] == 0.5
    assert clock.finished(outputs[2], 11.5) is not None


def test_steps_without_a_choice_do_not_shift_the_others() -> None:
    """Steps of prompts alone are not told to the clock, but their outputs come all the same."""
    clock, outputs, _ = steps_of(PLAIN, PLAIN)
    assert clock.finished(object(), 9.0) is None
    assert clock.finished(outputs[0], 10.0) is None
    found = clock.finished(outputs[1], 10.5)
    assert found is not None
    assert found[1] == 0.5


def test_idle_times_and_prompts_are_no_steps() -> None:
    clock, outputs, choice = steps_of(PLAIN)
    clock.finished(outputs[0], 1.0)
    chosen, late, prompt, after = choice.choose(4, 4096, passes=True), object(), object(), object()
    clock.scheduled(late, chosen, 5.0, measurable=True)
    found = clock.finished(late, 6.0)
    assert found is not None
    assert found[1] is None
    clock.scheduled(prompt, chosen, 6.0, measurable=False)
    assert clock.finished(prompt, 6.5) is None
    clock.scheduled(after, chosen, 6.5, measurable=True)
    assert clock.finished(after, 7.0) is None, "its drafts were made with a prompt's rows"
    assert clock.finished(object(), 8.0) is None
