"""What draft trees wrap in vLLM's model runner V2, each after a check of its signature.

* Before the model runs: rows have slots, and get the positions and the mask of their trees.
* A request begins: no tree waits for it. Where vLLM walks a request's rows as a chain (penalties,
  bad words, structured output, budgets of thinking), its trees are chains.
* The rejection sampler is ours, by vLLM's own extension point.
* Before the first request: where measured speed decides, full batches never have the largest trees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from nwor_specpv.vllm import registry, versions

from .wrapping import replace, wrap


def install() -> str | None:
    """Wraps these methods, once; the problem, if one is not as expected."""
    vllm = versions.adapter
    hooks = (
        (vllm.place_rows_v2, lambda method: wrap(method, _open, after=True)),
        (vllm.begin_request_v2, lambda method: wrap(method, _forget)),
        (vllm.make_samplers_v2, lambda method: replace(method, _sampling)),
        (vllm.warm_up_v2, lambda function: replace(function, _warming)),
    )
    for method, put in hooks:
        problem = put(method)
        if problem is not None:
            return problem
    return None


def _open(runner: Any, input_batch: Any) -> None:
    engine = registry.find_engine(runner.vllm_config)
    if engine is None or engine.trees is None:
        return
    drafts = input_batch.num_draft_tokens_per_req
    engine.trees.begin(
        input_batch.idx_mapping,
        input_batch.query_start_loc,
        input_batch.cu_num_logits,
        input_batch.positions,
        input_batch.num_scheduled_tokens.tolist(),
        None if drafts is None else drafts.tolist(),
    )


def _forget(model_state: Any, req_index: int, new_req_data: Any) -> None:
    config = model_state.vllm_config
    engine = registry.find_engine(config)
    if engine is not None and engine.trees is not None:
        # Processors of logits that are not vLLM's own are told of rows as if they were a chain.
        others = bool(config.model_config.logits_processors) or _installed_processors()
        engine.trees.forget(req_index, chain=others or walks_rows(new_req_data.sampling_params))


@functools.cache
def _installed_processors() -> bool:
    return bool(entry_points(group="vllm.logits_processors"))


def walks_rows(params: Any) -> bool:
    """Whether vLLM takes the rows of a request with these parameters for a chain."""
    return params is not None and bool(
        params.repetition_penalty != 1.0
        or params.frequency_penalty
        or params.presence_penalty
        or params.bad_words_token_ids
        or params.structured_outputs is not None
        or params.thinking_token_budget is not None
    )


def _sampling(original: Callable[..., Any]) -> Callable[..., Any]:
    def custom_sampler(model_state: Any, sampler: Any) -> Any:
        config = model_state.vllm_config
        engine = registry.find_engine(config)
        if engine is None or engine.trees is None:
            return original(model_state, sampler)
        from nwor_specpv.vllm.tree.sampler import TreeSampler

        ours = TreeSampler(sampler, engine, config.speculative_config, model_state.device)
        return sampler, ours

    return custom_sampler


def _warming(original: Callable[..., Any]) -> Callable[..., Any]:
    def warmup_kernels(model_runner: Any, *calls: Any) -> Any:
        engine = registry.find_engine(model_runner.vllm_config)
        if engine is None or not engine.tree_room:
            return original(model_runner, *calls)
        config, rows = model_runner.scheduler_config, model_runner.decode_query_len
        requests = config.max_num_seqs
        config.max_num_seqs = min(requests, max(1, engine.tree_room // rows))
        try:
            return original(model_runner, *calls)
        finally:
            config.max_num_seqs = requests

    return warmup_kernels
