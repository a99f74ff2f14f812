"""What an engine does after a fault, with a clock of our own and plans that are mere names."""

from __future__ import annotations

import logging

import pytest

from nwor_specpv import Metrics
from nwor_specpv.errors import NworError
from nwor_specpv.vllm import faults
from nwor_specpv.vllm.faults import Faults


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Plan:
    """A step's plan."""


def engines_without_drafts() -> int:
    return Metrics().snapshot()["nwor_staging_off_engines"]


def test_a_fault_drops_what_is_on_its_way_and_nothing_else() -> None:
    found = Faults(recovers=True, clock=Clock())
    before, first, second, after = plans = [Plan() for _ in range(4)]
    for plan in plans[:3]:
        found.plan(plan)
    assert found.process(before) == (False, False)
    recoveries = Metrics().snapshot()["nwor_recoveries_total"]
    found.lose("slot_range", "a commit was refused")
    found.plan(after)  # it was planned before anybody could tell the scheduler
    assert found.process(first) == (True, True)
    later = Plan()
    found.plan(later)
    assert found.process(second) == (False, True)
    assert found.process(after) == (False, True)
    assert found.process(later) == (False, False)
    assert Metrics().snapshot()["nwor_recoveries_total"] == recoveries + 1


def test_drafts_come_back_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    found = Faults(recovers=True, clock=clock)
    others = engines_without_drafts()
    assert not found.drafts_are_off
    with caplog.at_level(logging.INFO, "nwor_specpv"):
        found.lose("slot_range", "a commit was refused")
        assert found.drafts_are_off
        assert engines_without_drafts() == others + 1
        clock.now += faults.PAUSE_SECONDS - 1
        found.lose("slot_range", "a commit was refused")  # the pause begins anew
        clock.now += faults.PAUSE_SECONDS - 1
        assert found.drafts_are_off
        assert engines_without_drafts() == others + 1
        clock.now += 1
        assert not found.drafts_are_off
        assert not found.drafts_are_off
    assert engines_without_drafts() == others
    assert caplog.text.count("a commit was refused; running requests are computed again, and") == 2
    assert caplog.text.count("tokens are decoded without drafts for 60 s") == 2
    assert caplog.text.count("drafts are scheduled again") == 1


@pytest.mark.parametrize("reason", sorted(faults.LASTING))
def test_what_would_come_again_ends_drafts(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    found = Faults(recovers=True, clock=clock)
    for _ in range(3):
        found.stop(reason, "something")
        clock.now += 1e9
        assert found.drafts_are_off
        assert found.process(Plan()) == (False, False), "the cache is right"
    assert caplog.text.count("something; tokens are decoded without drafts until the server") == 1


def test_without_its_scheduler_an_engine_ends() -> None:
    found = Faults(recovers=False)
    with pytest.raises(NworError, match="a commit was refused; requests of this engine cannot be"):
        found.lose("slot_range", "a commit was refused")
    found.stop("write_failed", "it was written in another way")
    assert not found.drafts_are_off
