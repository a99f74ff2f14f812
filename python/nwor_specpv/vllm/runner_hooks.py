"""Where acceptance becomes known: one wrapped method of each model runner.

* V1, `GPUModelRunner._update_states_after_model_execute`: runs after every sampling step, before
  the drafter, with the sampled tokens still on the device.
* V2, `GPUModelRunner.postprocess_sampled`: the same moment, with the rejected tokens counted.

* V2 with long contexts, `GPUModelRunner.prepare_inputs`, too: the order of a step's requests.

All are wrapped once, after their parameters were compared with those that were read. They go when
vLLM tells attention backends what was accepted.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from . import compat, rows

_MARK = "_nwor_specpv_wrapped"


def install() -> str | None:
    """Wraps the methods of the runners this vLLM has; the problem, if one is not as expected."""
    from . import engine

    def finish_v1(runner: Any, output_token_ids: torch.Tensor, _: Any) -> None:
        found = engine.find_engine(runner.vllm_config)
        if found is not None and found.off is None:
            found.attach(runner)
            found.finish(functools.partial(rows.accepted_by_tokens, output_token_ids))

    def finish_v2(
        runner: Any, _idx: Any, _tokens: Any, _num: Any, num_rejected: torch.Tensor, *_: Any
    ) -> None:
        found = engine.find_engine(runner.vllm_config)
        if found is not None and found.off is None:
            found.attach(runner)
            found.finish(functools.partial(rows.accepted_by_rejections, num_rejected))

    problem = _wrap(
        "vllm.v1.worker.gpu_model_runner",
        "_update_states_after_model_execute",
        ("self", "output_token_ids", "scheduler_output"),
        finish_v1,
    )
    return problem or _wrap(
        "vllm.v1.worker.gpu.model_runner",
        "postprocess_sampled",
        ("self", "idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "query_start_loc"),
        finish_v2,
    )


def install_names() -> str | None:
    """Wraps the method of runner V2 that orders a step's requests; V1 keeps their names itself.

    It is told, too, how many drafts the scheduler wants for the next step.
    """
    from . import engine

    def name_v2(runner: Any, scheduler_output: Any, _: Any) -> None:
        found = engine.find_engine(runner.vllm_config)
        if found is not None:
            module = importlib.import_module("vllm.v1.worker.gpu.model_runner")
            rows_by_name = scheduler_output.num_scheduled_tokens
            found.names = module.sort_batch_req_ids(rows_by_name, runner.decode_query_len)
            found.num_drafts = scheduler_output.num_spec_tokens_to_schedule

    return _wrap(
        "vllm.v1.worker.gpu.model_runner",
        "prepare_inputs",
        ("self", "scheduler_output", "batch_desc"),
        name_v2,
    )


def _wrap(
    module: str, method: str, parameters: tuple[str, ...], first: Callable[..., None]
) -> str | None:
    try:
        runner = importlib.import_module(module).GPUModelRunner
        original = getattr(runner, method)
    except (ImportError, AttributeError) as error:
        return f"{module}.GPUModelRunner.{method} is not there: {error}"
    if getattr(original, _MARK, False):
        return None
    problem = compat.signature_problem(original, parameters)
    if problem is not None:
        return problem

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(wrapper, _MARK, True)
    setattr(runner, method, wrapper)
    return None
