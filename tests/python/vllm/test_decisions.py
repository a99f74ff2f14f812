"""What a step's decision is told of its requests: vLLM's plan says it, and so do the requests."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_specpv.arms import PLAIN, ArmChoice, Choice
from nwor_specpv.arms.estimates import Cell
from nwor_specpv.vllm.hooks.runner import COUNTS
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


class Resting(Decisions):
    """Plain steps alone, most of which are taken as they come."""

    rests = True

    def __init__(self) -> None:
        super().__init__(ArmChoice([PLAIN]))
        self.chosen = 0

    def choose(self, batch: int, context: float, longest: int, *, measurable: bool) -> Choice:
        self.chosen += 1
        return self.choice.choose(batch, context, passes=False, measurable=measurable)


class Service:
    """Steps of plain requests, each planned before the output of the last one is there."""

    def __init__(self) -> None:
        self.decisions = Resting()
        self.counts: Counter[str] = Counter()
        self._pending: Any = None
        self._now = 0.0

    def step(self, batch: int, *, new: bool = False, rows: int = 1) -> bool:
        """Whether it was decided for."""
        requests = {
            f"r{i}": SimpleNamespace(
                num_computed_tokens=2000, num_tokens=2001, num_output_placeholders=0
            )
            for i in range(batch)
        }
        output = plan(dict.fromkeys(requests, 1) | {"r0": rows}, {}, requests)
        output.scheduled_new_reqs = ["a request"] if new else []
        before = self.decisions.chosen
        assert self.decisions.decide(output, requests, self._now) == PLAIN
        assert output.num_spec_tokens_to_schedule == 0
        self.counts.update(getattr(output, COUNTS, {}))
        if self._pending is not None:
            self._now += 0.003
            self.decisions.finish(self._pending, [[1]] * batch, self._now)
        self._pending = output
        return self.decisions.chosen > before

    @property
    def cell(self) -> Cell:
        return self.decisions.choice._cells.find(16, 2001, passes=False)


def test_most_plain_steps_are_taken_as_they_come() -> None:
    service = Service()
    decided = [service.step(16) for _ in range(803)]
    assert all(decided[:5])  # until a few were measured
    assert 190 <= sum(decided[3:]) <= 230
    cell = service.cell
    assert cell.visits == 803 - service.decisions._rested
    assert cell.estimates[PLAIN].seconds == pytest.approx(0.003)
    assert service.counts["specpv_plain_steps_total"] == cell.visits
    timed = service.counts["specpv_plain_step_seconds_total"]
    assert timed == pytest.approx(3000 * service.counts["specpv_plain_step_tokens_total"] / 16)
    assert timed > 3000 * 90


@pytest.mark.parametrize("change", [{"batch": 17}, {"new": True}, {"rows": 5}])
def test_a_step_of_another_kind_is_decided_for(change: dict[str, Any]) -> None:
    service = Service()
    for _ in range(100):
        service.step(16)
    while service.step(16):
        pass
    assert service.decisions._left
    assert service.step(**{"batch": 16} | change)
