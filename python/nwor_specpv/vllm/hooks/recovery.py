"""Tells vLLM's scheduler of faults: outputs are dropped, requests preempted, drafts left out.

Each goes by means that the scheduler has for other purposes: requests are computed again as after
a preemption, and a request without drafts is one that its drafter had nothing for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nwor_specpv.vllm import registry, versions

from .wrapping import replace, wrap


def install() -> str | None:
    """Wraps the scheduler's methods, once; the problem, if one is not as expected."""
    vllm = versions.adapter
    return replace(vllm.plan_step, _planning) or wrap(vllm.take_output, _take)


def _planning(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        found = registry.find_engine(scheduler.vllm_config)
        if found is not None and found.faults.drafts_are_off:
            for request in scheduler.running:
                request.spec_token_ids = []
        plan = original(scheduler, *args, **kwargs)
        if found is not None:
            found.faults.plan(plan)
        return plan

    return schedule


def _take(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> None:
    found = registry.find_engine(scheduler.vllm_config)
    if found is None:
        return
    again, drop = found.faults.process(scheduler_output)
    if drop:
        drop_tokens(model_runner_output)
    if again:
        compute_again(scheduler)


def drop_tokens(output: Any) -> None:
    """Makes the output one of a step that gave no tokens."""
    output.sampled_token_ids = [[] for _ in output.sampled_token_ids or ()]
    output.logprobs = None
    output.prompt_logprobs_dict = {}


def compute_again(scheduler: Any) -> None:
    """Has all running requests computed from the start, and nothing found in the prefix cache."""
    manager = scheduler.kv_cache_manager
    manager.evict_blocks(set(range(len(manager.block_pool.blocks))))
    while scheduler.running:  # the last first: each goes before those that wait
        versions.adapter.preempt(scheduler, scheduler.running.pop())
    # They may come back in the very next step, which must not be taken for their next one.
    scheduler.prev_step_scheduled_req_ids.clear()
