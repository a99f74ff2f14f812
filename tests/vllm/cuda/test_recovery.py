"""Faults in service on a GPU: a commit that the device refuses is known before the next tokens
leave; requests are computed again, and what they get stays vLLM's up to rounding.

The story model in float16. Plain vLLM is computed once; `compare_runs.py` says what may differ.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from nwor_specpv import Metrics
from nwor_specpv.vllm import faults
from nwor_specpv.vllm.hooks.recovery import recovery_of
from support.broken_steps import (
    OF_LAYERS,
    OF_SLOTS,
    BrokenSteps,
    drafts_are_off,
    failures,
    reset,
)
from support.compare_runs import compare_runs
from support.disturbances import wanted
from support.engines import NGRAM, Story, drive, greedy, own_engine, release_engines, story_prompts
from support.engines import stats as own_stats
from support.gpu_engines import (
    EAGER,
    MODES,
    PLAIN,
    STOCK,
    both_modes,
    check_runner,
    choose_runner,
    stories_on_gpu,
)
from support.heads import story_head
from support.metric_counts import grown
from support.prefix_cache_blocks import scheduler_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

REQUESTS, TOKENS = 6, 80
ARRIVALS = [0, 0, 0, 4, 9, 30]
HALF = {"dtype": "float16"}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    llm = stories_on_gpu(PLAIN, **(EAGER | STOCK | HALF))
    found = drive(llm, story_prompts(REQUESTS), wanted(TOKENS)).outputs
    del llm
    release_engines()
    return found


def run_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, runner: str, **options: Any) -> Any:
    """An engine that has made its interceptor; V1 drafts by n-grams, V2 with a head."""
    choose_runner(monkeypatch, runner)
    head = story_head(folder, torch.float16) | {"num_speculative_tokens": 4}
    speculation = head if runner == "v2" else NGRAM
    llm = stories_on_gpu(
        {}, speculation=speculation, enable_prefix_caching=True, **(HALF | options)
    )
    drive(llm, story_prompts(1), greedy(2))
    check_runner(runner)
    return llm


def check_tokens(name: str, story: Story, expected: dict[str, Any]) -> None:
    for lengths in story.lengths.values():
        assert lengths == sorted(set(lengths)), "nothing was taken back, nothing came twice"
    assert all(len(tokens) == TOKENS for tokens in story.tokens.values())
    close = compare_runs((expected[i], story.outputs[i]) for i in expected)
    print(f"{name}: {close}")
    close.check(mean=0.005, most=0.1, share=0.5)


def serve(llm: Any) -> Story:
    return drive(llm, story_prompts(REQUESTS), wanted(TOKENS), arrivals=ARRIVALS)


@pytest.mark.serves("recovery", "V1")
@both_modes
def test_slots_that_a_commit_refuses_on_v1(
    expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Out of range, and twice: by the device's own status words. Drafts come back."""
    monkeypatch.setattr(faults, "PAUSE_SECONDS", 0.0)
    llm = run_engine(tmp_path, monkeypatch, "v1", **MODES[mode])
    for fault in OF_SLOTS:
        before, lost = Metrics().snapshot(), own_stats()["fallbacks"].get("commit_lost", 0)
        steps = BrokenSteps(own_engine(), fault)
        caplog.clear()
        with caplog.at_level(logging.ERROR, "nwor_specpv"):
            check_tokens(f"{mode}, {fault}", serve(llm), expected)
        steps.stop()
        assert steps.num_broken > 1
        assert caplog.text.count(f"a commit was refused with {fault}") == steps.num_broken
        assert grown(before, "nwor_recoveries_total") == steps.num_broken
        assert failures(before, Metrics().snapshot()) == {fault: steps.num_broken}
        assert own_stats()["fallbacks"] == {"commit_lost": lost + steps.num_broken}
        reset(llm)
    assert own_engine().num_replays > 0
    before_tokens = own_stats()["committed_tokens"]
    check_tokens(f"{mode}, afterwards", serve(llm), expected)
    assert own_stats()["committed_tokens"] > before_tokens


@pytest.mark.serves("recovery", "V2")
def test_slots_that_a_commit_refuses_on_v2(
    expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is wrong throughout and nothing is accepted, so commits are given counts that are
    too large. Steps are scheduled asynchronously: one is under way when it is known."""
    monkeypatch.setattr(faults, "PAUSE_SECONDS", 0.0)
    llm = run_engine(tmp_path, monkeypatch, "v2", **MODES["graphs"])
    engine, commit, broken = own_engine(), own_engine().steps._commit, []

    def elsewhere(step: Any, counts: torch.Tensor) -> list[Any]:
        """A count beyond the path, in every tenth commit."""
        broken.append(len(broken) % 10 == 3)
        if not broken[-1]:
            return commit(step, counts)
        too_many = torch.full_like(counts, step.path.shape[1] + 1)
        return [step.interceptor.commit(step.path, too_many, None, rows="request")]

    engine.steps._commit = elsewhere
    before = Metrics().snapshot()
    check_tokens("V2", serve(llm), expected)
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    refused = failures(before, Metrics().snapshot())
    print(f"{sum(broken)} of {len(broken)} commits were broken: {refused}")
    assert refused == {"count_range": sum(broken)}
    assert sum(broken) > 1
    # The last one may belong to a step behind which there was none.
    assert sum(broken) - 1 <= grown(before, "nwor_recoveries_total") <= sum(broken)


@pytest.mark.parametrize("fault", OF_LAYERS)
def test_what_layers_did_ends_drafts(
    expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Eager: a layer names other slots than the others, or stages nothing."""
    llm = run_engine(tmp_path, monkeypatch, "v1", **EAGER)
    before, steps = Metrics().snapshot(), BrokenSteps(own_engine(), fault)
    check_tokens(fault, serve(llm), expected)
    steps.stop()
    refused = failures(before, Metrics().snapshot())
    print(f"{fault}: {steps.num_broken} steps were broken, {refused}")
    assert refused == {fault: steps.num_broken}
    assert steps.num_broken == 1, "drafts were scheduled after it was known"
    assert grown(before, "nwor_recoveries_total") == 1
    assert drafts_are_off(llm)
    assert Metrics().snapshot()["nwor_staging_off_engines"] == 1
    committed = own_stats()["committed_tokens"]
    check_tokens(f"{fault}, afterwards", serve(llm), expected)
    assert own_stats()["committed_tokens"] == committed, "drafts were scheduled"


def test_drafts_pause_and_come_back(
    expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For PAUSE_SECONDS, by the engine's clock."""
    llm = run_engine(tmp_path, monkeypatch, "v1", **MODES["graphs"])
    engine, now = own_engine(), [0.0]
    engine.faults._clock = recovery_of(scheduler_of(llm))._clock = lambda: now[0]
    steps = BrokenSteps(engine, "slot_range")
    check_tokens("paused", serve(llm), expected)
    steps.stop()
    assert steps.num_broken == 1
    assert drafts_are_off(llm)
    now[0] += faults.PAUSE_SECONDS
    committed = own_stats()["committed_tokens"]
    check_tokens("come back", serve(llm), expected)
    assert own_stats()["committed_tokens"] > committed
    assert not drafts_are_off(llm)
