"""Mode `refresh` with prefix caching in the real vLLM on the CPU: K/V of partial steps is given to
nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nwor_specpv import Metrics
from nwor_specpv.errors import NworError
from nwor_specpv.vllm.specpv.rules import SCHEDULERS
from support.engine_process import run_script
from support.engines import STOCK, Story, counted, drive, greedy, own_engine, start
from support.engines import stats as own_stats
from support.installed import PAGE
from support.prefix_cache_blocks import count_published_blocks, scheduler_of, watch_requests
from support.small_views import LENGTHS, SMALL_VIEW, cover_all, prompts

VIEW = SMALL_VIEW | {"specpv_mode": "refresh", "check_contract": True}
VIEW_TOKENS = 96
MAX_TOKENS = 48


def begin(nwor: dict[str, Any] | None = None, **options: Any) -> Any:
    chosen = {"scheduler_cls": SCHEDULERS[False], "enable_prefix_caching": True} | options
    return start(VIEW | (nwor or {}), **chosen)


def check_published(llm: Any, requests: list[Any]) -> int:
    """Every block that can be found is of full attention. How many there are."""
    found, beyond = count_published_blocks(llm, requests, VIEW_TOKENS)
    assert beyond == 0, f"{beyond} of {found} blocks"
    return found


def blocks_of(tokens: int) -> int:
    return tokens // PAGE


def check_books() -> None:
    assert own_stats()["fallbacks"] == {}
    assert own_engine().violations == []


def continued(story: Story) -> list[list[int]]:
    return [prompt + story.tokens[str(i)] for i, prompt in enumerate(prompts())]


@pytest.mark.serves("refresh", "V1")
@pytest.mark.quick
def test_answers_of_partial_steps_are_not_found() -> None:
    before = Metrics().snapshot()
    llm = begin(max_num_batched_tokens=96)
    requests = watch_requests(llm)
    first = drive(llm, prompts(), greedy(MAX_TOKENS), arrivals=[0, 0, 3, 9, 9, 20])
    assert Metrics().snapshot()["specpv_partial_steps_total"] > before["specpv_partial_steps_total"]
    shortest = blocks_of(min(LENGTHS) + MAX_TOKENS - 1)  # its answer is as vLLM publishes it
    assert check_published(llm, requests) > sum(blocks_of(n) for n in LENGTHS) + shortest
    # The same prompts again: all of each but its last token, in whole blocks.
    second = drive(llm, prompts(), greedy(4))
    assert [second.cached[str(i)] for i in range(6)] == [(n - 1) // PAGE * PAGE for n in LENGTHS]
    # Their answers behind them: what partial steps have computed is computed again.
    longer = continued(first)
    third = drive(llm, longer, greedy(1, logprobs=5))
    found = [third.cached[str(i)] for i in range(6)]
    ends = [n + MAX_TOKENS - 1 for n in LENGTHS]  # K/V of the last token was never computed
    full = [min(end, max(VIEW_TOKENS, n)) for end, n in zip(ends, LENGTHS, strict=True)]
    assert found == [tokens // PAGE * PAGE for tokens in full]
    # So the next token is as likely as where nothing is found: such requests look for nothing.
    alone = drive(llm, longer, greedy(1, logprobs=5, prompt_logprobs=0))
    assert set(alone.cached.values()) == {0}
    for name, output in third.outputs.items():
        wanted, got = alone.outputs[name].logprobs[0], output.logprobs[0]
        assert {t: p.logprob for t, p in got.items()} == pytest.approx(
            {t: p.logprob for t, p in wanted.items()}, abs=1e-4
        )
    check_published(llm, requests)
    check_books()


@pytest.mark.serves("refresh", "V1")
def test_requests_that_are_preempted_and_come_back() -> None:
    llm = begin(num_gpu_blocks_override=800 // PAGE, max_model_len=320)
    requests = watch_requests(llm)
    story = drive(llm, prompts(), greedy(MAX_TOKENS), aborts={6: "2"})
    assert counted(llm, "vllm:num_preemptions") > 0
    assert all(len(story.tokens[str(i)]) == MAX_TOKENS for i in (0, 1, 3, 4, 5))
    assert check_published(llm, requests) > 10
    check_books()


@pytest.mark.serves("refresh", "V1")
def test_views_that_cover_the_context_give_the_tokens_of_plain_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts, the same again, their answers behind them; steps beyond 64 tokens are partial."""

    def three(llm: Any) -> list[Story]:
        first = drive(llm, prompts(), greedy(MAX_TOKENS), arrivals=[0, 0, 3, 9, 9, 20])
        again = drive(llm, prompts(), greedy(MAX_TOKENS))
        return [first, again, drive(llm, continued(first), greedy(MAX_TOKENS))]

    expected = three(start(STOCK, enable_prefix_caching=True))
    from nwor_specpv.vllm.specpv.scheduler import RefreshScheduler

    before = Metrics().snapshot()["specpv_partial_steps_total"]
    llm = begin({"specpv_n_retrieval_blocks": 24}, scheduler_cls=RefreshScheduler)
    cover_all(monkeypatch, 64)
    scheduler_of(llm).full_tokens = 64
    stories = three(llm)
    assert [story.tokens for story in stories] == [story.tokens for story in expected]
    assert Metrics().snapshot()["specpv_partial_steps_total"] > before + 100
    assert stories[1].cached == expected[1].cached
    for index, length in enumerate(LENGTHS):
        assert 0 < stories[2].cached[str(index)] <= max(64, length)
    check_books()


def test_what_is_refused() -> None:
    both = r"published to other requests.*scheduler\.RefreshScheduler.*--no-enable-prefix-caching"
    with pytest.raises(NworError, match=both):
        begin(scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    with pytest.raises(NworError, match=r"for synchronous.*scheduler\.RefreshScheduler"):
        begin(scheduler_cls=SCHEDULERS[True])


@pytest.mark.slow
@pytest.mark.serves("refresh", "V2")
def test_asynchronous_scheduling_on_model_runner_v2(tmp_path: Path) -> None:
    """An EAGLE3 head; one prompt ends in a piece of one row, and some requests are preempted."""
    options = {"nwor": VIEW, "scheduler_cls": SCHEDULERS[True], "enable_prefix_caching": True}
    options |= {"num_gpu_blocks_override": 800 // PAGE, "max_model_len": 320}
    options |= {"long_prefill_token_threshold": 149, "speculation": {"num_speculative_tokens": 4}}
    job = {"start": options, "prompts": prompts(), "max_tokens": 24}
    script = Path(__file__).parents[2] / "support" / "processes" / "refresh_v2.py"
    found, log = run_script(tmp_path, job, script, VLLM_USE_V2_MODEL_RUNNER="1")
    print(log[-2000:])
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert found["async"]
    assert found["violations"] == []
    assert found["preemptions"] > 0
    assert found["full_tokens"] == VIEW_TOKENS - 4
    number, beyond = found["published"]
    assert number > 320 // PAGE
    assert beyond == 0
    for index, length in enumerate(LENGTHS):
        assert found["cached"][str(index)] <= max(VIEW_TOKENS - 4, length)
    decisions = found["decisions"]
    assert [149, 1, True, False] in decisions
    assert not any(views for *_, prefilling, views in decisions if prefilling)
    assert sum(views for *_, views in decisions) > 50
