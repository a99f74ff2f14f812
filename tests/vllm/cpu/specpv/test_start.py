"""Drafting over views starts before the first request: memory is taken, and passes are timed.

Model runner V1, the story model. V2: `test_speculator.py`, `../test_runner_v2.py`.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest

from nwor_specpv import Metrics
from nwor_specpv.vllm.specpv.rules import DRAFTER
from support.cache_write_watch import watch_cost_measurement
from support.engines import STOCK, check_drafting, draft_failures, drive, greedy, own_engine, start
from support.installed import PAGE
from support.small_views import SMALL_VIEW, prompts

SPECULATION = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 8}
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    story = drive(start(STOCK, speculation=None), prompts(), greedy(MAX_TOKENS))
    return [story.tokens[str(i)] for i in range(len(prompts()))]


@pytest.fixture(autouse=True)
def before(expected: list) -> dict[str, Any]:
    return Metrics().snapshot()


def begin(nwor: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    """An engine that has had no request, and its drafter."""
    llm = start(SMALL_VIEW | (nwor or {}), speculation=SPECULATION, **options)
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return llm, executor.driver_worker.worker.model_runner.drafter


def run(llm: Any) -> list[list[int]]:
    story = drive(llm, prompts(), greedy(MAX_TOKENS))
    return [story.tokens[str(i)] for i in range(len(prompts()))]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    from nwor_specpv.vllm.specpv import drafter as module

    return watch_cost_measurement(monkeypatch, module, "measure_passes")


def lines(caplog: pytest.LogCaptureFixture, part: str) -> int:
    return sum(part in record.getMessage() for record in caplog.records)


def test_costs_and_memory_are_there_before_the_first_request(
    expected: list, before: dict, measured: list, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "nwor_specpv"):
        llm, drafter = begin({"check_contract": True})
        costs, store, tail = drafter._costs, drafter._store, drafter._tail
        assert costs.run(1, 0) > 0
        assert measured == [True]
        assert tail.keys.shape[1] == store.max_requests == 8
        assert not tail.keys.any()
        assert len(store._free) == 8
        assert run(llm) == expected
    # The first long request measures nothing, nor takes memory.
    assert drafter._costs is costs
    assert drafter._store is store
    assert measured == [True]
    assert lines(caplog, f"partial passes: {costs}") == lines(caplog, "measured") == 1
    assert lines(caplog, "views of 8 requests take") == 1
    assert own_engine().violations == []
    check_drafting(before)


def test_fixed_passes_take_memory_and_measure_nothing(
    expected: list, before: dict, measured: list
) -> None:
    llm, drafter = begin({"specpv_draft_passes": 3})
    store = drafter._store
    assert store is not None
    assert run(llm) == expected
    assert drafter._store is store
    assert drafter._costs is None
    assert measured == []
    name = "specpv_draft_passes_total"
    assert Metrics().snapshot()[name] > before[name]
    check_drafting(before)


@pytest.mark.parametrize(("threshold", "taken"), [(292, False), (291, True)])
def test_nothing_is_taken_where_no_request_can_be_long(
    threshold: int, taken: bool, measured: list
) -> None:
    llm, drafter = begin({"specpv_partial_threshold": threshold}, max_model_len=300)
    assert (drafter._store is not None) == (drafter._costs is not None) == taken
    assert measured == [True] * taken
    asked = []
    has_view = drafter._has_view
    drafter._has_view = lambda *args: asked.append(has_view(*args)) or asked[-1]
    longest = 300 - SPECULATION["num_speculative_tokens"]  # for which vLLM asks for drafts
    drive(llm, [(prompts()[0] * 2)[:longest]], greedy(4))
    assert asked == [taken]


def test_nothing_is_taken_where_vllm_lowers_the_longest_context(measured: list) -> None:
    """To what its caches hold, which is known after the drafter was made."""
    per_token = 5 * 2 * 4 * 32 * 4  # layers, K and V, heads, their size, float32
    llm, drafter = begin(max_model_len=-1, kv_cache_memory_bytes=(64 + PAGE) * per_token)
    assert 48 <= llm.llm_engine.vllm_config.model_config.max_model_len <= 80
    assert drafter._store is drafter._costs is None
    assert measured == []
    drive(llm, [prompts()[0][:40]], greedy(4))


def test_a_measurement_that_fails_leaves_lookups(
    expected: list,
    before: dict,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from nwor_specpv.vllm.specpv.target import TargetModel

    def fail(*_: Any) -> Any:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "nwor_specpv"):
        patch.setattr(TargetModel, "greedy", fail)
        llm, drafter = begin()
    assert draft_failures(before) == {"start": 1}
    said = "so requests draft by lookups alone: RuntimeError: injected"
    assert lines(caplog, said) == 1
    assert drafter._store is drafter._tail is drafter._costs is None
    assert run(llm) == expected
    assert draft_failures(before) == {"start": 1}
    name = "specpv_draft_passes_total"
    assert Metrics().snapshot()[name] == before[name]
