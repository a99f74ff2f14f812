"""Steps that let in a request whose prefix another request of the same step may still compute.

vLLM's prefix cache knows a block as soon as the step that fills it is planned, so a request that
comes in with that step may hit it. vLLM's layers write before they attend, and all is well. Ours
may write late (`Steps.begin`, `may_defer`), and a full CUDA graph does whatever was captured. Such
a step does neither: its layers write first, and vLLM, which picks full graphs for uniform batches,
is told that it is none.

The plan of a step is seen first (`plan_step_*`), then vLLM asks whether the step is uniform
(`is_uniform_v1`, `uniform_rows_v2`), within one call of `execute_model`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nwor_specpv.vllm import registry, versions

from .wrapping import replace, wrap


class _Plan:
    """What the plan of the step in hand says, for functions that are not told whose step it is."""

    hits = False

    @classmethod
    def take(cls) -> bool:
        hits, cls.hits = cls.hits, False  # a dummy step has no plan
        return hits


def may_hit(scheduler_output: Any) -> bool:
    """Whether a request that begins in this step, or begins again, has K/V of earlier tokens."""
    if len(scheduler_output.num_scheduled_tokens) < 2:
        return False
    begins_again = scheduler_output.scheduled_cached_reqs.resumed_req_ids
    begins = scheduler_output.scheduled_new_reqs
    return bool(begins_again) or any(request.num_computed_tokens > 0 for request in begins)


def install() -> str | None:
    """Wraps these functions, once; the problem, if one is not as expected."""

    def note(runner: Any, scheduler_output: Any) -> None:
        found = registry.find_engine(runner.vllm_config)
        stages = found is not None and found.off is None
        _Plan.hits = stages and may_hit(scheduler_output)
        if stages:
            found.prefix_hits = _Plan.hits

    vllm = versions.adapter
    return (
        wrap(vllm.plan_step_v1, note)
        or wrap(vllm.plan_step_v2, note)
        or replace(vllm.is_uniform_v1, _answering(False))
        or replace(vllm.uniform_rows_v2, _answering(None))
    )


def _answering(no: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Has the function answer `no` for a step with hits, unless the caller forces an answer."""

    def answering(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            forced = kwargs.get("force_uniform_decode") is not None or len(args) > 4
            return no if not forced and _Plan.take() else original(*args, **kwargs)

        return wrapper

    return answering
