"""Views in lossless mode only where they pay: on made-up machines, and on a tiny model."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from nwor_specpv.transformers import Generator
from nwor_specpv.transformers.views.pacer import CallSizes, ViewPacer
from tests.python.specpv.contexts import seeded
from tests.python.transformers.test_specpv_modes import TREE, configured
from tests.python.transformers.tiny_models import Oracle, decode_plainly, random_prompt, tiny


@dataclass
class Machine:
    """Seconds of a step: a pass that grows with its rows, and attention over the context."""

    fixed: float
    row: float
    read: float  # for each token of the context that is read
    seen: float  # for each row and token

    def cost(self, rows: float) -> float:
        return self.fixed + self.row * rows

    def step(self, rows: float, context: int) -> float:
        return self.cost(rows) + context * (self.read + self.seen * rows)


# A CPU as measured (ms): rows and tokens cost alike early. A GPU: K/V is read once for all rows.
CPU = Machine(0.035, 0.0030, 3e-6, 0.7e-6)
GPU = Machine(0.005, 0.00002, 2e-7, 1e-10)
ROWS, TOKENS, DRAFTING, VIEW, TAIL = 8, 4, 0.005, 1024, 48


def simulate(
    machine: Machine, context: int, right: float, *, count: int = 2000, known: bool = True
) -> tuple[float, ViewPacer]:
    """Time of plain full steps over that of a paced run; a tail's token stands with `right`."""
    rng = random.Random(3)
    pacer = ViewPacer(machine.cost if known else None, rows_cost=machine is CPU)
    pacer.begin()
    size, spent, shown, waiting = CallSizes(1, VIEW, TAIL), 0.0, 0, 0
    switching = False
    while shown < count:
        if switching and waiting == 0:
            pacer.switch()
            switching = False
        if not pacer.viewing:
            seconds = machine.step(ROWS, context) + DRAFTING
            shown += TOKENS
            switching |= pacer.full_step(size, context, ROWS, TOKENS, seconds, DRAFTING)
        elif waiting and (pacer.hurry or switching or waiting + ROWS > TAIL):
            seconds = machine.step(ROWS + waiting, context) + DRAFTING
            kept = next((i for i in range(waiting) if rng.random() > right), waiting)
            told = kept + (TOKENS if kept == waiting else 1)
            lost = waiting - kept
            shown += told
            switching |= pacer.confirmation(size, told, lost, waiting, seconds)
            waiting = 0
        else:
            seconds = machine.step(ROWS, VIEW) + DRAFTING
            waiting += TOKENS
            pacer.partial_step(seconds)
        spent += seconds
    return shown / TOKENS * (machine.step(ROWS, context) + DRAFTING) / spent, pacer


@pytest.mark.parametrize(("count", "least"), [(160, 0.985), (2000, 0.97)])
@pytest.mark.parametrize("right", [0.5, 0.95, 0.99, 1.0])
@pytest.mark.parametrize("context", [1500, 4096, 6144, 32768, 131072])
@pytest.mark.parametrize("machine", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_paced_run_is_never_noticeably_slower(
    machine: Machine, context: int, right: float, count: int, least: float
) -> None:
    """Also in the first tokens; trials of rows lose some of their time, too."""
    gain, _ = simulate(machine, context, right, count=count)
    assert gain > least


@pytest.mark.parametrize("context", [1500, 4096, 6144])
def test_what_cannot_pay_is_not_even_tried(context: int) -> None:
    gain, pacer = simulate(CPU, context, 1.0)
    assert pacer.trials == 0
    assert gain == pytest.approx(1.0)


def test_views_that_pay_are_kept() -> None:
    gain, pacer = simulate(GPU, 131072, 0.999)
    assert gain > 1.5
    assert pacer.viewing
    assert simulate(CPU, 131072, 0.999)[0] > 1.1


def test_views_that_lose_their_tails_are_tried_ever_more_rarely() -> None:
    gain, pacer = simulate(GPU, 131072, 0.5, count=20000)
    assert gain > 0.97
    assert 2 <= pacer.trials <= 8


def test_without_a_curve_of_costs_a_trial_tells() -> None:
    assert simulate(CPU, 6144, 0.98, known=False)[0] > 0.95
    assert simulate(GPU, 131072, 0.999, known=False)[0] > 1.5


def test_a_paced_generation_says_what_plain_decoding_says() -> None:
    rng = seeded()
    model = tiny()
    prompts = [random_prompt(rng, 70, 120) for _ in range(2)]
    truths = {tuple(p): decode_plainly(model, p, 48) for p in prompts}
    for tree in (TREE, None):  # a size that is given, so that costs are unknown; and one chosen
        drafter = Oracle(truths, rng, feature_layers=(1,))
        made = Generator(model, drafter=drafter, specpv=configured("lossless"), check_contract=True)
        for _ in range(6):
            for prompt in prompts:
                result = made.generate(prompt, 48, tree=tree)
                assert result.token_ids == truths[tuple(prompt)]
                assert result.stats.violations == []
        batch = made.generate(prompts, 48, tree=tree)
        assert batch.token_ids == list(truths.values())
        assert {pacer.trials > 0 for pacer in made._pacers.values()} >= ({True} if tree else set())
