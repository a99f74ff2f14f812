"""Faults that a commit finds by itself, on the CPU: what is said, and tokens that stay vLLM's.

On a GPU the same is tested by cuda/test_recovery.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from nwor_specpv import Metrics
from nwor_specpv.vllm import faults
from support.broken_steps import (
    OF_LAYERS,
    OF_SLOTS,
    BrokenSteps,
    drafts_are_off,
    failures,
    reset,
)
from support.engines import STOCK, drive, greedy, own_engine, start, story_prompts
from support.engines import stats as own_stats
from support.metric_counts import grown

REQUESTS, TOKENS = 6, 60


@pytest.mark.slow
def test_faults_that_a_commit_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are refused as bad input, and rows are written from staging. What layers did is learned
    in the next step, as on a GPU: requests are computed again, and drafts end."""
    monkeypatch.setattr(faults, "PAUSE_SECONDS", 0.0)
    expected = drive(start(STOCK), story_prompts(REQUESTS), greedy(TOKENS)).tokens
    llm = start({}, enable_prefix_caching=True)
    drive(llm, story_prompts(1), greedy(2))  # the interceptor is made
    engine = own_engine()
    for fault in OF_SLOTS + OF_LAYERS:
        late = fault in OF_LAYERS
        engine.steps._learns_late = lambda _, late=late: late
        before, old = Metrics().snapshot(), own_stats()["fallbacks"]
        steps = BrokenSteps(engine, fault)
        assert drive(llm, story_prompts(REQUESTS), greedy(TOKENS)).tokens == expected, fault
        steps.stop()
        assert steps.num_broken > 0
        assert failures(before, Metrics().snapshot()) == {fault: steps.num_broken}
        assert grown(before, "nwor_recoveries_total") == (steps.num_broken if late else 0)
        assert drafts_are_off(llm) is late
        found: dict[str, Any] = own_stats()["fallbacks"]
        told = "commit_lost" if late else "commit_failure"
        assert found[told] - old.get(told, 0) == steps.num_broken
        reset(llm)
    before = own_stats()["committed_tokens"]
    assert drive(llm, story_prompts(REQUESTS), greedy(TOKENS)).tokens == expected
    assert own_stats()["committed_tokens"] > before
