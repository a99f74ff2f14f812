"""What a step's decision is told of its requests: vLLM's plan says it, and so do the requests."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_specpv.arms import PLAIN, ArmChoice, Choice
from nwor_specpv.arms.estimates import Cell
from nwor_specpv.vllm.scheduling.decisions import Decisions


class Told(Decisions):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(ArmChoice([PLAIN]))
        self.latest: tuple[int, float, int, bool] | None = None

    def choose(self, batch: int, context: float, longest: int, *, measurable: bool) -> Choice:
        self.latest = batch, context, longest, measurable
        return Choice(PLAIN, Cell())


def plan(rows: dict[str, int], drafts: dict[str, int], requests: dict[str, Any]) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=rows,
        total_num_scheduled_tokens=sum(rows.values()),
        scheduled_spec_decode_tokens={name: [-1] * number for name, number in drafts.items()},
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            num_computed_tokens=[requests[name].num_computed_tokens for name in rows]
        ),
    )


@pytest.mark.parametrize("seed", range(20))
def test_a_step_without_prompts_is_told_as_its_requests_tell_it(seed: int) -> None:
    rng, decisions = random.Random(seed), Told()
    for step in range(20):
        rows, drafts, requests = {}, {}, {}
        for index in range(rng.randint(1, 100)):
            name, number, computed = f"r{index}", rng.choice([0, 0, 4, 16]), rng.randint(1, 40_000)
            waiting = rng.randint(0, 2)  # tokens that are on their way
            requests[name] = SimpleNamespace(
                num_computed_tokens=computed,
                num_tokens=computed + 1 - waiting,
                num_output_placeholders=waiting,
            )
            rows[name] = 1 + number
            if number:
                drafts[name] = number
        output = plan(rows, drafts, requests)
        decisions.decide(output, requests, step)
        batch, context, longest, measurable = decisions.latest
        ends = [requests[name].num_computed_tokens + number for name, number in rows.items()]
        assert (batch, context, measurable) == (len(ends), sum(ends) / len(ends), True)
        assert max(ends) <= longest < max(ends) + max(rows.values())
        output.scheduled_new_reqs = ["with a prompt of one token"]
        decisions.decide(output, requests, step)
        assert decisions.latest == (batch, context, max(ends), True)


def test_a_prompt_that_is_not_done_gets_no_token() -> None:
    decisions = Told()
    requests = {
        "prompt": SimpleNamespace(
            num_computed_tokens=512, num_tokens=2000, num_output_placeholders=0
        ),
        "decode": SimpleNamespace(num_computed_tokens=99, num_tokens=99, num_output_placeholders=1),
    }
    decisions.decide(plan({"prompt": 512, "decode": 1}, {}, requests), requests, 0.0)
    assert decisions.latest == (1, 100, 100, False)
    del requests["decode"]
    decisions.latest = None
    assert decisions.decide(plan({"prompt": 512}, {}, requests), requests, 1.0) == PLAIN
    assert decisions.latest is None
