"""Where acceptance becomes known, and when drafting over views starts: wrapped methods of vLLM's.

* `install`: after every sampling step, before the drafter. Runner V1 has the sampled tokens on the
  device then, runner V2 has counted the rejected ones.
* `install_plan`, on V2: how many drafts each request of a step has, where vLLM says so; for long
  contexts the order of its requests, too.
* `install_idle`, in mode `lossless` on V2: the end of a step. Where it has no drafts and makes
  none, vLLM's runner is as one without a speculator.
* `install_start`, in mode `lossless`: the end of the worker's start. Caches have memory and graphs
  are captured, and no request has come. vLLM tells drafters nothing then: one of a class is called
  with steps alone, a speculator's `capture` only where there are graphs, and on the CPU the worker
  runs nothing at all between its caches and the first request.

The last goes when vLLM tells drafters that caches are there, the others when it tells attention
backends what was accepted. Each returns the problem where a method is not as expected.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from nwor_specpv import _C
from nwor_specpv.vllm import draft_rows, registry, versions

from .wrapping import replace, wrap

# Attributes of a step's plan that our scheduler sets: see `scheduling.decisions`.
PASSES, COUNTS = "nwor_specpv_passes", "nwor_specpv_counts"


def install() -> str | None:
    """Wraps the methods of both runners that know what was accepted."""

    def finish_v1(runner: Any, output_token_ids: torch.Tensor, _: Any) -> None:
        found = registry.find_engine(runner.vllm_config)
        if found is not None and found.off is None:
            found.attach(runner)
            found.finish(functools.partial(draft_rows.accepted_by_tokens, output_token_ids))

    def finish_v2(
        runner: Any, _idx: Any, _tokens: Any, _num: Any, num_rejected: torch.Tensor, *_: Any
    ) -> None:
        found = registry.find_engine(runner.vllm_config)
        if found is not None and found.off is None:
            found.attach(runner)
            found.finish(functools.partial(draft_rows.accepted_by_rejections, num_rejected))

    vllm = versions.adapter
    return wrap(vllm.after_sampling_v1, finish_v1) or wrap(vllm.after_sampling_v2, finish_v2)


def install_plan() -> str | None:
    """Wraps the method of runner V2 that orders a step's requests; V1 keeps their names itself.

    It is told, too, what drafts the scheduler wants for the next step: see `scheduling.decisions`.
    """

    def name_v2(runner: Any, scheduler_output: Any, *more: Any) -> None:
        found = registry.find_engine(runner.vllm_config)
        if found is None:
            return
        vllm = versions.adapter
        found.scheduled_drafts = vllm.scheduled_drafts(*more)
        found.num_drafts = vllm.wanted_drafts(scheduler_output)
        if found.refresh is not None:
            found.names = vllm.names_of(runner, scheduler_output, *more)
        found.plain_step = not (found.num_drafts or scheduler_output.scheduled_spec_decode_tokens)
        if found.lengths is not None:
            found.num_passes = 0
            if found.num_drafts:
                found.num_passes = _passes(scheduler_output, found.lengths)
        for name, amount in getattr(scheduler_output, COUNTS, {}).items():
            _C.count(name, amount)

    return wrap(versions.adapter.order_requests_v2, name_v2)


def _passes(scheduler_output: Any, lengths: Any) -> int:
    """Partial passes that make the drafts of the next step. A scheduler that is not ours has no
    word for them."""
    chosen = getattr(scheduler_output, PASSES, None)
    if chosen is not None:
        return chosen
    rows, known = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_cached_reqs
    computed = dict(zip(known.req_ids, known.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    return lengths.passes_that_fill(max(computed[name] + rows[name] for name in rows))


def install_idle() -> str | None:
    """Has runner V2 leave out what a plain step asks of a speculator, where that has nothing to do:
    drafts that nobody wants would be made, scattered and gathered."""

    def leave_out(original: Callable[..., Any]) -> Callable[..., Any]:
        def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
            found, speculator = registry.find_engine(runner.vllm_config), runner.speculator
            if found is None or not found.plain_step or not getattr(speculator, "idles", False):
                return original(runner, *args, **kwargs)
            drafts = runner.num_speculative_steps
            runner.speculator, runner.num_speculative_steps = None, 0
            try:
                return original(runner, *args, **kwargs)
            finally:
                runner.speculator, runner.num_speculative_steps = speculator, drafts

        return sample_tokens

    return replace(versions.adapter.end_step_v2, leave_out)


def install_memory(worker_class: str) -> str | None:
    """Has the method of vLLM's worker, of the class that is named, which says how much memory there
    is for caches, leave some for views. Where the user has said how large caches are, that stands;
    and on the CPU, where vLLM leaves enough. Meanwhile vLLM tries graphs on caches of few blocks,
    and the engine knows it."""

    def leave_room(original: Callable[..., int]) -> Callable[..., int]:
        def determine_available_memory(worker: Any) -> int:
            config = worker.vllm_config
            found = registry.find_engine(config)
            if found is None:
                return original(worker)
            found.sizes_caches = True
            try:
                available = original(worker)
            finally:
                found.sizes_caches = False
            said = config.cache_config.kv_cache_memory_bytes
            return available if said else found.left_for_caches(available)

        return determine_available_memory

    return replace(versions.adapter.measure_memory(worker_class), leave_room)


def install_start(worker_class: str) -> str | None:
    """Wraps the method of vLLM's worker, of the class that is named, which ends the start."""

    def start(worker: Any) -> None:
        found = registry.find_engine(worker.vllm_config)
        if found is not None and found.lossless:
            runner = worker.model_runner
            drafter = runner.speculator if found.lengths is not None else runner.drafter
            drafter.start()

    return wrap(versions.adapter.end_of_start(worker_class), start, after=True)
