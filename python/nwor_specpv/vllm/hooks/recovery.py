"""Tells vLLM's scheduler of faults: outputs are dropped, requests preempted, drafts left out.

Each goes by means that the scheduler has for other purposes: requests are computed again as after
a preemption, and a request without drafts is one that its drafter had nothing for. What a KV
connector has kept is forgotten as after a change of weights.

A worker's notice is an attribute of the step's output. It is there in the scheduler's process, too:
vLLM pickles outputs (executor `mp`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nwor_specpv.errors import NworError
from nwor_specpv.vllm import registry, versions
from nwor_specpv.vllm.faults import Notice, Recovery

from .wrapping import replace, when_imported, wrap

NOTICE = "nwor_specpv_notice"  # of an output
RECOVERY = "nwor_specpv_recovery"  # of a scheduler


def prepare() -> None:
    """Has the scheduler's methods wrapped when vLLM imports it: its process may have no worker."""
    when_imported(versions.adapter.plan_step.module, install_scheduler)


def install() -> str | None:
    """Wraps the methods of scheduler and worker, once; the problem, if one is not as expected."""
    return install_scheduler() or replace(versions.adapter.end_step, _telling)


def install_scheduler() -> str | None:
    vllm = versions.adapter
    return replace(vllm.plan_step, _planning) or wrap(vllm.take_output, _take)


# ---- the worker ----


def _telling(original: Callable[..., Any]) -> Callable[..., Any]:
    def sample_tokens(worker: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(worker, *args, **kwargs)
        found = registry.find_engine(worker.vllm_config)
        notice = found.faults.take() if found is not None else None
        if notice is not None:
            tell(output, notice)
        return output

    return sample_tokens


def tell(output: Any, notice: Notice) -> None:
    """Puts the notice on an output, or on the one that will be made of it."""
    make = getattr(output, "get_output", None)
    if make is None:
        setattr(output, NOTICE, notice)
        return

    def get_output() -> Any:
        made = make()
        tell(made, notice)
        return made

    output.get_output = get_output


# ---- the scheduler ----


def recovery_of(scheduler: Any) -> Recovery:
    found = getattr(scheduler, RECOVERY, None)
    if found is None:
        found = Recovery()
        setattr(scheduler, RECOVERY, found)
    return found


def _planning(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        recovery = recovery_of(scheduler)
        if recovery.drafts_are_off:
            for request in scheduler.running:
                request.spec_token_ids = []
        plan = original(scheduler, *args, **kwargs)
        recovery.plan(plan)
        return plan

    return schedule


def _take(scheduler: Any, scheduler_output: Any, model_runner_output: Any) -> None:
    notice = getattr(model_runner_output, NOTICE, None)
    again, drop = recovery_of(scheduler).process(scheduler_output, notice)
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
    """Has all running requests computed from the start, and nothing found that was kept."""
    manager = scheduler.kv_cache_manager
    manager.evict_blocks(set(range(len(manager.block_pool.blocks))))
    # No copy of a wrong block can be loaded yet: this is before it is known to be complete.
    if scheduler.connector is not None and scheduler.connector.reset_cache() is not True:
        raise NworError(
            "nwor_specpv: accepted tokens are missing from the cache, and the KV connector keeps "
            "copies that cannot be told to go: restart the server"
        )
    while scheduler.running:  # the last first: each goes before those that wait
        versions.adapter.preempt(scheduler, scheduler.running.pop())
    # They may come back in the very next step, which must not be taken for their next one.
    scheduler.prev_step_scheduled_req_ids.clear()
