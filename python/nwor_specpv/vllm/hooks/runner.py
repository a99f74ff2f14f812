"""Where acceptance becomes known, and when drafting over views starts: wrapped methods of vLLM's.

* V1, `GPUModelRunner._update_states_after_model_execute`: runs after every sampling step, before
  the drafter, with the sampled tokens still on the device.
* V2, `GPUModelRunner.postprocess_sampled`: the same moment, with the rejected tokens counted.

* V2 with long contexts, `GPUModelRunner.prepare_inputs`, too: the order of a step's requests.

* Long contexts in mode `lossless`, `compile_or_warm_up_model` of the worker: caches have memory and
  graphs are captured, and no request has come. vLLM tells drafters nothing then: one of a class is
  called with steps alone, a speculator's `capture` only where there are graphs, and on the CPU the
  worker runs nothing at all between its caches and the first request.

All are wrapped once, after their parameters were compared with those that were read. The last goes
when vLLM tells drafters that caches are there, the others when it tells attention backends what was
accepted. What `prefix_hits` wraps is its own matter.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from nwor_specpv.vllm import registry, rows, versions

MARK = "_nwor_specpv_wrapped"


def install() -> str | None:
    """Wraps the methods of the runners this vLLM has; the problem, if one is not as expected."""

    def finish_v1(runner: Any, output_token_ids: torch.Tensor, _: Any) -> None:
        found = registry.find_engine(runner.vllm_config)
        if found is not None and found.off is None:
            found.attach(runner)
            found.finish(functools.partial(rows.accepted_by_tokens, output_token_ids))

    def finish_v2(
        runner: Any, _idx: Any, _tokens: Any, _num: Any, num_rejected: torch.Tensor, *_: Any
    ) -> None:
        found = registry.find_engine(runner.vllm_config)
        if found is not None and found.off is None:
            found.attach(runner)
            found.finish(functools.partial(rows.accepted_by_rejections, num_rejected))

    problem = wrap(
        "vllm.v1.worker.gpu_model_runner",
        "_update_states_after_model_execute",
        ("self", "output_token_ids", "scheduler_output"),
        finish_v1,
    )
    return problem or wrap(
        "vllm.v1.worker.gpu.model_runner",
        "postprocess_sampled",
        ("self", "idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "query_start_loc"),
        finish_v2,
    )


def install_names() -> str | None:
    """Wraps the method of runner V2 that orders a step's requests; V1 keeps their names itself.

    It is told, too, how many drafts the scheduler wants for the next step.
    """

    def name_v2(runner: Any, scheduler_output: Any, _: Any) -> None:
        found = registry.find_engine(runner.vllm_config)
        if found is not None:
            module = importlib.import_module("vllm.v1.worker.gpu.model_runner")
            rows_by_name = scheduler_output.num_scheduled_tokens
            found.names = module.sort_batch_req_ids(rows_by_name, runner.decode_query_len)
            found.num_drafts = scheduler_output.num_spec_tokens_to_schedule

    return wrap(
        "vllm.v1.worker.gpu.model_runner",
        "prepare_inputs",
        ("self", "scheduler_output", "batch_desc"),
        name_v2,
    )


def install_start(worker_class: str) -> str | None:
    """Wraps the method of vLLM's worker, of the class that is named, which ends the start."""

    def start(worker: Any) -> None:
        found = registry.find_engine(worker.vllm_config)
        if found is not None and found.lossless:
            runner = worker.model_runner
            drafter = runner.speculator if found.lengths is not None else runner.drafter
            drafter.start()

    module, _, owner = worker_class.rpartition(".")
    return wrap(module, "compile_or_warm_up_model", ("self",), start, owner=owner, after=True)


def wrap(
    module: str,
    method: str,
    parameters: tuple[str, ...],
    own: Callable[..., None],
    *,
    owner: str = "GPUModelRunner",
    after: bool = False,
) -> str | None:
    """Has `own` called with what the method gets, before it or `after` it."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not after:
                own(self, *args, **kwargs)
            found = original(self, *args, **kwargs)
            if after:
                own(self, *args, **kwargs)
            return found

        return wrapper

    return replace(module, f"{owner}.{method}", parameters, around)


def replace(
    module: str,
    path: str,
    parameters: tuple[str, ...],
    make: Callable[[Callable[..., Any]], Any],
) -> str | None:
    """Puts what `make` returns for it in a function's or method's place, once."""
    *owners, name = path.split(".")
    try:
        holder: Any = functools.reduce(getattr, owners, importlib.import_module(module))
        original = getattr(holder, name)
    except (ImportError, AttributeError) as error:
        return f"{module}.{path} is not there: {error}"
    if getattr(original, MARK, False):
        return None
    problem = versions.signature_problem(original, parameters)
    if problem is not None:
        return problem
    made = functools.wraps(original)(make(original))
    setattr(made, MARK, True)
    is_static = isinstance(vars(holder).get(name), staticmethod)
    setattr(holder, name, staticmethod(made) if is_static else made)
    return None
