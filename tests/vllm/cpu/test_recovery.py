"""Faults in service: requests are computed again, drafts pause, tokens stay vLLM's."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_specpv import Metrics, NworError
from nwor_specpv.vllm import faults, steps
from nwor_specpv.vllm.hooks.recovery import recovery_of
from support.engine_process import run_job
from support.engines import STOCK, drive, greedy, own_engine, start, story_prompts
from support.metric_counts import grown
from support.prefix_cache_blocks import scheduler_of
from support.refusals import fail_commits, refuse_commits

pytestmark = pytest.mark.serves("recovery", "V1")

REQUESTS, TOKENS = 6, 80


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return drive(start(STOCK), story_prompts(REQUESTS), greedy(TOKENS)).tokens


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "PAUSE_SECONDS", 0.0)


def run_engine(nwor: dict[str, Any] | None = None, **options: Any) -> Any:
    """An engine that has made its interceptor."""
    llm = start(nwor or {}, enable_prefix_caching=True, **options)
    drive(llm, story_prompts(1), greedy(2))
    return llm


def recoveries() -> int:
    return Metrics().snapshot()["nwor_recoveries_total"]


@pytest.mark.quick
def test_refused_commits_are_survived_and_seen(
    expected: dict[str, list[int]], no_pause: None, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU: what became of a commit is known in the next step. Requests come and go."""
    llm, before = run_engine(), recoveries()
    interceptor = refuse_commits(own_engine(), {3, 4, 9, 20})
    with caplog.at_level(logging.ERROR, "nwor_specpv"):
        story = drive(llm, story_prompts(REQUESTS), greedy(TOKENS), arrivals=[0, 0, 0, 4, 9, 30])
    assert story.tokens == expected
    assert interceptor.num_failed == 4
    assert recoveries() - before == interceptor.num_failed
    assert caplog.text.count("a commit was refused with slot_range") == interceptor.num_failed
    for lengths in story.lengths.values():
        assert lengths == sorted(set(lengths)), "nothing was taken back, nothing came twice"
    stats = own_engine().interceptor.stats()
    assert stats["fallbacks"] == {"commit_lost": interceptor.num_failed}
    assert stats["committed_tokens"] > 0


def test_rows_that_were_lost_are_not_found_in_the_prefix_cache(
    expected: dict[str, list[int]], no_pause: None
) -> None:
    """The last commit of a request was refused, and nobody is left to compute it again."""
    llm = run_engine()
    refuse_commits(own_engine(), set(range(1, 10**4)))
    prompt = story_prompts(1)[0]
    first = drive(llm, [prompt], greedy(TOKENS)).tokens["0"]
    assert first == expected["0"]
    own_engine().staging.interceptor.calls = set()
    text = prompt + first
    plain = drive(start(STOCK), [text], greedy(40)).tokens["0"]
    assert drive(llm, [text], greedy(40)).tokens["0"] == plain


def test_tokens_that_cannot_be_written_are_computed_again(
    expected: dict[str, list[int]], no_pause: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by the commit nor row by row."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no write either")

    llm, before = run_engine(), recoveries()
    interceptor = fail_commits(own_engine(), set(range(1, 10**4, 5)))
    monkeypatch.setattr(steps, "write_direct", fail)
    assert drive(llm, story_prompts(REQUESTS), greedy(TOKENS)).tokens == expected
    assert recoveries() - before == interceptor.num_failed > 2


@pytest.mark.parametrize(
    "apart",
    [
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        pytest.param(
            {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["worker apart", "scheduler and worker apart"],
)
def test_a_scheduler_in_another_process_is_told(
    expected: dict[str, list[int]], tmp_path: Path, apart: dict[str, str]
) -> None:
    """Executor `mp`, which servers on a CPU always have."""
    job = {
        "start": {
            "nwor": {},
            "enable_prefix_caching": True,
            "distributed_executor_backend": "mp",
        },
        "commits": ("refused", [3, 4, 9, 20]),
        "prompts": story_prompts(REQUESTS),
        "arrivals": [0, 0, 0, 4, 9, 30],
        "max_tokens": TOKENS,
    }
    result = run_job(tmp_path, job, **apart)
    assert result["tokens"] == [expected[str(i)] for i in range(REQUESTS)]
    (worker,) = result["ranks"]
    assert worker["stats"]["fallbacks"] == {"commit_lost": 4}
    assert worker["counted"]["nwor_recoveries_total"] == 4
    assert worker["stats"]["committed_tokens"] > 0
    assert result["log"].count("a commit was refused with slot_range") == 4


def test_where_nobody_hears_of_it_tokens_that_cannot_be_written_end_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With Ray's executor, say: the requests must not go on, and it is counted."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no write either")

    llm = run_engine()
    engine = own_engine()
    engine.faults._recovers = False
    fail_commits(engine, {1})
    monkeypatch.setattr(steps, "write_direct", fail)
    with pytest.raises(NworError, match=r"injected; RuntimeError: no write either; .* restart"):
        drive(llm, story_prompts(REQUESTS), greedy(TOKENS))
    stats = engine.interceptor.stats()
    assert stats["fallbacks"] == {"commit_lost": 1}
    assert not stats["round_open"]


def test_a_failing_commit_degrades_and_the_engine_goes_on(
    expected: dict[str, list[int]], no_pause: None, caplog: pytest.LogCaptureFixture
) -> None:
    llm, before = run_engine(), recoveries()
    interceptor = fail_commits(own_engine(), set(range(2, 60, 2)))
    with caplog.at_level(logging.ERROR, "nwor_specpv"):
        story = drive(llm, story_prompts(REQUESTS), greedy(TOKENS))
    assert "accepted rows are written one by one: RuntimeError: injected" in caplog.text
    assert story.tokens == expected
    stats = own_engine().interceptor.stats()
    assert stats["aborted_rounds"] >= interceptor.num_failed > 5
    assert stats["fallbacks"] == {"commit_failure": interceptor.num_failed}
    assert stats["committed_tokens"] > 0
    assert recoveries() == before


def test_drafts_pause_and_come_back(expected: dict[str, list[int]]) -> None:
    llm = run_engine()
    clock = SimpleNamespace(now=0.0)
    engine = own_engine()
    engine.faults._clock = recovery_of(scheduler_of(llm))._clock = lambda: clock.now
    interceptor = refuse_commits(engine, {1})
    assert drive(llm, story_prompts(REQUESTS), greedy(TOKENS)).tokens == expected
    assert interceptor.num_commits == 1, "no drafts, nothing to commit"
    assert Metrics().snapshot()["nwor_staging_off_engines"] == 1
    clock.now += faults.PAUSE_SECONDS
    assert drive(llm, story_prompts(REQUESTS), greedy(TOKENS)).tokens == expected
    assert interceptor.num_commits > 10
    assert Metrics().snapshot()["nwor_staging_off_engines"] == 0


def test_after_a_broken_contract_the_engine_serves_on_without_drafts(
    expected: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    llm, before = run_engine({"check_contract": True}), Metrics().snapshot()
    engine = own_engine()
    own, spoilt = engine.layers[engine.own_layers[0]].kv_cache, []
    verify = engine.checker.verify

    def break_once(*args: Any) -> Any:
        """A byte of another slot changes while a commit runs."""
        if not spoilt:
            spoilt.append(1)
            own.view(-1)[-1] += 1
        return verify(*args)

    engine.staging.checker = SimpleNamespace(
        snapshot=engine.checker.snapshot,
        verify_staged=engine.checker.verify_staged,
        verify=break_once,
    )
    with caplog.at_level(logging.ERROR, "nwor_specpv"):
        assert drive(llm, story_prompts(REQUESTS), greedy(TOKENS)).tokens == expected
    assert grown(before, "nwor_recoveries_total") == 1
    assert grown(before, "nwor_contract_violations_total") == len(engine.violations) >= 1
    assert caplog.text.count("the contract checker found") == len(engine.violations)
    assert recovery_of(scheduler_of(llm)).drafts_are_off
    assert caplog.text.count("the commit contract was broken; running requests are computed") == 1
