"""Partial views in the real vLLM on a GPU: what is done before the first request, and what partial
steps publish. The story model, on both model runners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nwor_specpv import Metrics
from nwor_specpv.vllm.specpv.rules import SCHEDULERS
from support.engines import NGRAM, check_drafting, counted, drive, greedy, own_engine
from support.engines import stats as own_stats
from support.gpu_engines import (
    GRAPHS,
    LOOKUPS,
    SCHEDULER,
    all_kinds,
    both_runners,
    check_runner,
    choose_runner,
    stories_on_gpu,
)
from support.heads import story_head
from support.metric_counts import grown
from support.prefix_cache_blocks import PAGE, count_published_blocks, scheduler_of, watch_requests
from support.small_views import LENGTHS, SMALL_VIEW, prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MAX_TOKENS = 48
HALF = {"dtype": "float16"}


def worker_runner(llm: Any) -> Any:
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


# ---- mode `lossless`: memory ----


@all_kinds
def test_memory_is_there_before_the_first_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    guesses, _, mode = kind.partition("-")
    choose_runner(monkeypatch, "v2")
    before = Metrics().snapshot()
    speculation = story_head(tmp_path, torch.float16) if guesses == "head" else LOOKUPS
    options: dict[str, Any] = {"speculation": speculation, "scheduler_cls": SCHEDULER}
    options |= GRAPHS if mode == "graphs" else {"enforce_eager": True}
    nwor = SMALL_VIEW | ({"check_contract": True} if mode == "eager" else {})
    llm = stories_on_gpu(nwor, **(HALF | options))
    runs = worker_runner(llm)
    assert not hasattr(runs, "input_batch"), "the V1 runner was used"

    loop = runs.speculator._loop
    assert loop is not None, "no memory was taken at start"
    story = drive(llm, prompts(), greedy(MAX_TOKENS))
    assert all(len(tokens) == MAX_TOKENS for tokens in story.tokens.values())
    assert runs.speculator._loop is loop
    assert own_engine().violations == []
    assert own_stats()["fallbacks"] == {}
    check_drafting(before)


# ---- mode `refresh` with prefix caching ----

REFRESH = SMALL_VIEW | {"specpv_mode": "refresh"}


@both_runners("refresh")
def test_answers_of_partial_steps_are_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Full graphs, requests that are preempted; vLLM schedules V2's steps asynchronously."""
    choose_runner(monkeypatch, runner)
    before = Metrics().snapshot()
    asynchronous = runner == "v2"
    speculation = NGRAM
    if runner == "v2":
        speculation = story_head(tmp_path, torch.float16) | {"num_speculative_tokens": 4}
    llm = stories_on_gpu(
        REFRESH,
        speculation=speculation,
        scheduler_cls=SCHEDULERS[asynchronous],
        enable_prefix_caching=True,
        num_gpu_blocks_override=50,
        max_model_len=320,
        **(HALF | GRAPHS),
    )
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling is asynchronous
    requests = watch_requests(llm)
    story = drive(llm, prompts(), greedy(MAX_TOKENS))
    check_runner(runner)
    assert all(len(tokens) == MAX_TOKENS for tokens in story.tokens.values())
    assert counted(llm, "vllm:num_preemptions") > 0
    assert own_engine().num_replays > 0
    partial = grown(before, "specpv_partial_steps_total")
    full = scheduler_of(llm).full_tokens
    found, beyond = count_published_blocks(llm, requests, full)
    # One prompt alone, for which there is room: it stays, and so does nothing of its answer.
    answer = drive(llm, [prompts()[2]], greedy(MAX_TOKENS)).tokens["0"]
    again = drive(llm, [prompts()[2]], greedy(4)).cached["0"]
    longer = prompts()[2] + answer
    with_answer = drive(llm, [longer], greedy(4)).cached["0"]
    print(f"{runner}: {partial} partial steps, {beyond} of {found} blocks are of partial steps, "
          f"{again} tokens of a prompt of {LENGTHS[2]} found again, {with_answer} with its "
          "answer behind it")  # fmt: skip
    assert partial > 20
    assert found > 10
    assert beyond == 0
    assert LENGTHS[2] - 3 * PAGE < again < LENGTHS[2]  # with a head a block less
    assert again <= with_answer <= max(full, LENGTHS[2])
    assert own_stats()["fallbacks"] == {}
