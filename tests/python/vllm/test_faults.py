"""What an engine does after a fault, with a clock of our own and plans that are mere names."""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_specpv import Metrics
from nwor_specpv.errors import NworError
from nwor_specpv.vllm import faults
from nwor_specpv.vllm.faults import Faults, Notice, Recovery
from nwor_specpv.vllm.hooks import recovery

LOST = Notice(lost=True, seconds=60.0)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Plan:
    """A step's plan."""


@dataclass
class Output:
    """Of a step, as vLLM pickles it."""

    sampled_token_ids: list[list[int]]


def engines_without_drafts() -> int:
    return Metrics().snapshot()["nwor_staging_off_engines"]


def test_a_fault_drops_what_is_on_its_way_and_nothing_else() -> None:
    found = Recovery(Clock())
    before, first, second, after = plans = [Plan() for _ in range(4)]
    for plan in plans[:3]:
        found.plan(plan)
    assert found.process(before, None) == (False, False)
    found.plan(after)  # it was planned before anybody could tell the scheduler
    assert found.process(first, LOST) == (True, True)
    later = Plan()
    found.plan(later)
    assert found.process(second, None) == (False, True)
    assert found.process(after, LOST) == (False, True), "what it had lost is computed again"
    assert found.process(later, None) == (False, False)


def test_a_fault_that_left_the_cache_right_drops_nothing() -> None:
    clock = Clock()
    found, plan = Recovery(clock), Plan()
    found.plan(plan)
    assert found.process(plan, Notice(lost=False, seconds=60.0)) == (False, False)
    assert found.drafts_are_off
    clock.now += 60
    assert not found.drafts_are_off


def test_drafts_come_back_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    """Worker and scheduler count alike; the scheduler begins when it is told."""
    clock, others = Clock(), engines_without_drafts()
    worker, scheduler = Faults(recovers=True, clock=clock), Recovery(clock)
    before = Metrics().snapshot()["nwor_recoveries_total"]
    assert worker.take() is None
    assert not scheduler.drafts_are_off
    with caplog.at_level(logging.INFO, "nwor_specpv"):
        worker.lose("slot_range", "a commit was refused")
        assert engines_without_drafts() == others + 1
        assert scheduler.process(Plan(), worker.take()) == (True, True)
        clock.now += faults.PAUSE_SECONDS - 1
        worker.lose("slot_range", "a commit was refused")  # the pause begins anew
        scheduler.process(Plan(), worker.take())
        clock.now += faults.PAUSE_SECONDS - 1
        worker.note_step([4])  # planned before the pause
        assert scheduler.drafts_are_off
        assert engines_without_drafts() == others + 1
        clock.now += 1
        assert not scheduler.drafts_are_off
        worker.note_step([0])
        assert engines_without_drafts() == others + 1
        worker.note_step([0, 4])
        worker.note_step([4])
    assert engines_without_drafts() == others
    assert Metrics().snapshot()["nwor_recoveries_total"] == before + 2
    assert caplog.text.count("a commit was refused; running requests are computed again, and") == 2
    assert caplog.text.count("tokens are decoded without drafts for 60 s") == 2
    assert caplog.text.count("drafts are scheduled again") == 1


@pytest.mark.parametrize("reason", sorted(faults.LASTING))
def test_what_would_come_again_ends_drafts(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    worker, scheduler = Faults(recovers=True, clock=clock), Recovery(clock)
    for _ in range(3):
        worker.stop(reason, "something")
        assert scheduler.process(Plan(), worker.take()) == (False, False), "the cache is right"
        clock.now += 1e9
        worker.note_step([4])
        assert worker.drafts_are_off
        assert scheduler.drafts_are_off
    assert caplog.text.count("something; tokens are decoded without drafts until the server") == 1


def test_faults_of_one_step_are_one_notice() -> None:
    found = Faults(recovers=True, clock=Clock())
    found.lose("slot_range", "a commit was refused")
    found.stop("slot_mismatch", "layers disagree")
    assert found.take() == Notice(lost=True, seconds=float("inf"))
    assert found.take() is None


def test_where_nobody_hears_of_it_an_engine_ends() -> None:
    found = Faults(recovers=False)
    with pytest.raises(NworError, match="a commit was refused; requests of this engine cannot be"):
        found.lose("slot_range", "a commit was refused")
    found.stop("write_failed", "it was written in another way")
    assert not found.drafts_are_off
    assert found.take() is None


def test_a_rank_that_vllm_does_not_listen_to(caplog: pytest.LogCaptureFixture) -> None:
    """What all ranks know the first one tells. With a fault of its own this rank's process ends:
    vLLM would go on after an error."""
    found = Faults(recovers=True, rank=1, clock=Clock())
    found.stop("write_failed", "it was written in another way")
    assert not found.drafts_are_off
    found.lose("rank_disagreement", "ranks accepted different tokens")
    assert found.drafts_are_off
    with pytest.raises(SystemExit) as ended:
        found.lose("slot_range", "a commit was refused")
    assert ended.value.code == 1
    assert "a commit was refused; rank 1 ends, since the other ranks do not know it" in caplog.text


@pytest.mark.parametrize("late", [False, True], ids=["an output", "one that is yet to be made"])
def test_a_notice_goes_with_the_output_to_another_process(late: bool) -> None:
    output: Any = Output([[1, 2]])
    told: Any = SimpleNamespace(get_output=lambda: output) if late else output
    recovery.tell(told, LOST)
    if late:
        assert not hasattr(output, recovery.NOTICE)
        assert told.get_output() is output
    there = pickle.loads(pickle.dumps(output))
    assert getattr(there, recovery.NOTICE) == LOST
    assert there == output, "nothing else of it is changed"


class Connector:
    def __init__(self, forgets: bool | None) -> None:
        self.reset_cache = lambda: forgets


@pytest.mark.parametrize("forgets", [None, False])
def test_copies_that_are_kept_end_the_engine(forgets: bool | None) -> None:
    """`None` is what vLLM's base class returns."""
    pool = SimpleNamespace(blocks=[0, 1])
    scheduler = SimpleNamespace(
        connector=Connector(forgets),
        kv_cache_manager=SimpleNamespace(block_pool=pool, evict_blocks=lambda _: None),
    )
    with pytest.raises(NworError, match="keeps copies that cannot be told to go: restart the ser"):
        recovery.compute_again(scheduler)
