"""Mode `refresh` in the real vLLM on the CPU: verify steps over the view, request by request."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import torch

from nwor_specpv import Metrics
from nwor_specpv.errors import NworError
from support.engines import STOCK, counted, drive, greedy, own_engine, start, story_prompts
from support.engines import stats as own_stats
from support.installed import PAGE
from support.metric_counts import full_steps_since, grown
from support.small_views import LENGTHS, SMALL_VIEW, cover_all, prompts

pytestmark = pytest.mark.serves("refresh", "V1")

VIEW = SMALL_VIEW | {"specpv_mode": "refresh", "check_contract": True}
MAX_TOKENS = 48


def begin(nwor: dict[str, Any] | None = None, **options: Any) -> Any:
    return start(VIEW | (nwor or {}), enable_prefix_caching=False, **options)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    story = drive(start(STOCK), prompts(), greedy(MAX_TOKENS))
    return [story.tokens[str(i)] for i in range(len(LENGTHS))]


def check_books() -> None:
    stats = own_stats()
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"] > 0
    assert stats["fallbacks"] == {}
    assert own_engine().violations == []


def test_a_budget_that_covers_the_context_is_full_attention_bit_for_bit(
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Views of all blocks: the same tokens, and every layer's output the same bits."""
    llm = begin({"specpv_n_retrieval_blocks": 24, "specpv_full_refresh_interval": 3})
    compared = watch_views(monkeypatch)
    story = drive(llm, prompts(), greedy(MAX_TOKENS), arrivals=[0, 0, 3, 9, 9, 20])
    assert [story.tokens[str(i)] for i in range(6)] == expected
    assert len(compared) > 50
    assert all(compared)
    check_books()


def watch_views(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Lets requests be partial though the view covers them; compares with no view at all."""
    from nwor_specpv.vllm.specpv import refresh

    compared = []
    after = refresh.RefreshStep.after

    def watched(self: Any, layer: str, attend: Any, query: Any, output: Any) -> None:
        if (self.views.store.num_blocks[: self.count] >= 0).any():
            compared.append(torch.equal(output, attend(None)))
        after(self, layer, attend, query, output)

    monkeypatch.setattr(refresh.RefreshStep, "after", watched)
    cover_all(monkeypatch)
    return compared


def test_requests_decide_for_themselves(caplog: pytest.LogCaptureFixture) -> None:
    before = Metrics().snapshot()
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        llm = begin({"specpv_full_refresh_interval": 4}, max_num_batched_tokens=96)
    assert "mode 'refresh' is NOT lossless" in caplog.text
    assert Metrics().snapshot()["specpv_lossy_engines"] > 0
    story = drive(llm, prompts(), greedy(MAX_TOKENS), arrivals=[0, 0, 3, 9, 9, 20])
    assert all(len(tokens) == MAX_TOKENS for tokens in story.tokens.values())
    check_books()
    assert grown(before, "specpv_partial_steps_total") > 50
    new = full_steps_since(before)
    assert new["first"] == 4  # two requests are shorter than the view
    assert new["interval"] > 10
    assert new["short_context"] > 10
    read, whole = (grown(before, f"specpv_kv_bytes_{name}_total") for name in ("read", "full"))
    assert 0.3 * whole < read < 0.9 * whole
    # Drift was looked for in three layers of the full steps, and some rows differ.
    probed = grown(before, "specpv_probed_rows_total")
    assert probed > 30
    assert 0 < grown(before, "specpv_deviating_rows_total") < probed


def test_a_tail_without_room_is_verified_in_full() -> None:
    """No interval: full steps come when a step's rows would not fit behind the view."""
    before = Metrics().snapshot()
    llm = begin({"specpv_full_refresh_interval": 0, "specpv_n_spec_tokens_buf": 8})
    drive(llm, prompts(), greedy(MAX_TOKENS))
    check_books()
    new = full_steps_since(before)
    assert new["first"] == 4
    assert new["interval"] == 0
    assert new["tail_full"] > 4
    assert grown(before, "specpv_partial_steps_total") > new["tail_full"]


def test_preempted_and_aborted_requests_give_their_rows_back() -> None:
    llm = begin({"specpv_max_requests": 3}, num_gpu_blocks_override=800 // PAGE, max_model_len=320)
    story = drive(llm, prompts(), greedy(MAX_TOKENS), aborts={6: "2"})
    assert counted(llm, "vllm:num_preemptions") > 0
    assert all(len(story.tokens[str(i)]) == MAX_TOKENS for i in (0, 1, 3, 4, 5))
    drive(llm, [[1, 5]], greedy(2))
    views = own_engine().refresh.views
    assert len(views.store._free) == 3
    check_books()


def watch_decisions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Of every request in every step: what its first row is, whether it had or chose a view."""
    from nwor_specpv.vllm.specpv.refresh_requests import RefreshRequests

    decide, found = RefreshRequests._decide, []

    def watched(self: Any, name: str, context: int, *args: Any, in_front: bool) -> Any:
        made = decide(self, name, context, *args, in_front=in_front)
        request = own_engine().runner.requests[name]
        kind = "prompt" if context < request.num_prompt_tokens else "last"
        if kind == "last" and context + 1 < request.num_tokens:
            kind = "again"
        found.append((kind, made.partial or made.select))
        return made

    monkeypatch.setattr(RefreshRequests, "_decide", watched)
    return found


def test_prompts_in_pieces_of_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a piece has as many rows as a step without drafts: it is full, and chooses no blocks.
    So it is with answers that are computed again after a preemption."""
    decisions = watch_decisions(monkeypatch)
    # Every step of every request has one row, so that no draft is verified either.
    llm = begin(
        long_prefill_token_threshold=1, num_gpu_blocks_override=800 // PAGE, max_model_len=320
    )
    same = [(prompt * 40)[:120] for prompt in story_prompts(6)]
    drive(llm, same, greedy(MAX_TOKENS))
    assert counted(llm, "vllm:num_preemptions") > 0
    number = Counter(decisions)
    assert (number["prompt", True], number["again", True]) == (0, 0)
    assert number["prompt", False] > 6 * 120
    assert number["again", False] > 5
    assert number["last", True] > 100
    assert own_engine().violations == []


def test_caches_that_vllm_makes_anew(expected: list[list[int]]) -> None:
    """As on a GPU, where it tries graphs on caches of few blocks before it makes the real ones."""
    llm = begin({"specpv_n_retrieval_blocks": 24})
    drive(llm, prompts(), greedy(4))
    engine = own_engine()
    runner, old = engine.runner, engine.refresh.views
    config = runner.kv_cache_config
    runner._cleanup_profiling_kv_cache()
    runner.initialize_kv_cache(config)
    assert engine.interceptor is None, "the old caches are kept"
    story = drive(llm, prompts(), greedy(MAX_TOKENS))
    assert [story.tokens[str(i)] for i in range(6)] == expected
    assert engine.refresh.views is not old
    caches = [layer.kv_cache.data_ptr() for layer in engine.layers.values()]
    assert [cache.data_ptr() for cache in engine.refresh.views.store.key_caches] == caches
    check_books()


def test_steps_stay_full_where_blocks_cannot_be_chosen(
    expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    before = Metrics().snapshot()
    llm = begin()
    drive(llm, prompts()[1:2], greedy(4))
    store = own_engine().refresh.views.store

    def failing(*_: Any) -> None:
        raise RuntimeError("injected")

    store.refresh_layer = failing
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        story = drive(llm, prompts(), greedy(MAX_TOKENS))
    assert caplog.text.count("selected, so steps stay full: RuntimeError: injected") == 1
    assert [story.tokens[str(i)] for i in range(6)] == expected
    assert grown(before, "specpv_partial_steps_total") == 0
    new = full_steps_since(before)
    assert new["first"] == 4
    assert new["refresh_failure"] > 40
    check_books()


def test_steps_stay_full_where_views_cannot_be_made(
    expected: list[list[int]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is not there is told once, and serving goes on."""
    from nwor_specpv.vllm.specpv import refresh

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(refresh, "RefreshViews", fail)
    before = Metrics().snapshot()
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        story = drive(begin(), prompts(), greedy(MAX_TOKENS))
    assert [story.tokens[str(i)] for i in range(6)] == expected
    assert caplog.text.count("views could not be made, so all steps are full: out of memory") == 1
    assert full_steps_since(before)["refresh_failure"] > 40
    check_books()


def test_prefix_caching_is_refused_with_vllms_own_scheduler() -> None:
    theirs = "vllm.v1.core.sched.scheduler.Scheduler"
    with pytest.raises(NworError, match=r"prefix caching.*--no-enable-prefix-caching"):
        start(VIEW, enable_prefix_caching=True, scheduler_cls=theirs)
