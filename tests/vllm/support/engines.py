"""Starts real vLLM engines and drives them step by step.

Nothing of ours is imported at the top: some jobs run where our library cannot be loaded.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
STOCK = {"enable_nwor": False}  # vLLM's own attention and write, with the plugin loaded
STAGED = {"check_contract": True, "strict": True}
DIRECT = {"max_staging_bytes": 1}  # our layout and kernels; no round fits, all rows are written

_STORIES = (
    "Once upon a time, there was a little girl named Lily. She loved to play",
    "One day a dog",
    "Tom and Tim were friends. Tom and Tim were",
    "The sun was hot. The bird",
    "Ben had a red ball. Ben had a red",
    "A cat sat",
)


def story_prompts(count: int = 3) -> list[list[int]]:
    """Token ids of the shipped story model."""
    from nwor_specpv.models.tiny_model import TinyTokenizer

    tokenizer = TinyTokenizer()
    return [tokenizer.encode(_STORIES[i % len(_STORIES)]) for i in range(count)]


def engine_options(
    nwor: Mapping[str, Any], *, speculation: Any = NGRAM, model: str = "", **options: Any
) -> dict[str, Any]:
    """vLLM's arguments: the shipped story model unless told otherwise."""
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "block_size": _page(),
        "disable_log_stats": False,
        "kv_cache_memory_bytes": 16 << 20,
        "speculative_config": dict(speculation) if speculation else None,
        "additional_config": {"nwor_specpv": dict(nwor)},
    }
    if not model:
        from nwor_specpv.models import stories

        model = str(stories())
        defaults["skip_tokenizer_init"] = True
    return defaults | options | {"model": model}


def start(nwor: Mapping[str, Any], **options: Any):
    """An engine in this process; `options` are those of `engine_options`."""
    from vllm import LLM

    override_kernels_once()
    llm = LLM(**engine_options(nwor, **options))
    # From vLLM 0.32 on an engine that is dropped ends the process groups of all others here.
    finalizer = getattr(llm.llm_engine.engine_core, "_finalizer", None)
    if finalizer is not None and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        finalizer.detach()
    return llm


def override_kernels_once() -> None:
    """From vLLM 0.32 on its workers look through all modules for kernels to replace, and fail there
    once llvmlite is imported. So they are replaced now, and not again."""
    from vllm.platforms import current_platform

    platform, name = type(current_platform), "register_triton_kernel_overrides"
    original = getattr(platform, name, None)
    if original is not None and not hasattr(original, "cache_info"):
        once = functools.cache(getattr(current_platform, name))
        once()
        setattr(platform, name, staticmethod(once))


def _page() -> int:
    """Tokens of a page."""
    try:
        from support.installed import PAGE
    except ImportError:  # our library cannot be loaded
        return 32  # any version takes it
    return PAGE


def draft_failures(before: dict[str, Any]) -> dict[str, int]:
    """Failed drafting over views since the snapshot `before`, by reason."""
    from nwor_specpv import Metrics

    name = "specpv_draft_failures_total"
    now = Metrics().snapshot()[name]
    grown = {reason: count - before[name].get(reason, 0) for reason, count in now.items()}
    return {reason: count for reason, count in grown.items() if count}


def check_drafting(before: dict[str, Any]) -> None:
    """No drafting over views has failed since the snapshot `before`; if some has, it says how."""
    failed = draft_failures(before)
    assert failed == {}, (
        f"drafting failed {failed}, at last by {own_engine().draft_failures.latest}"
    )


def greedy(max_tokens: int = 80, **more: Any):
    from vllm import SamplingParams

    return SamplingParams(
        **({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | more),
    )


@dataclass
class Story:
    """What a run of several requests gave: their tokens, and what the engine counted."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    outputs: dict[str, Any] = field(default_factory=dict)  # vLLM's own, with log-probabilities
    lengths: dict[str, list[int]] = field(default_factory=dict)  # whenever tokens had come
    cached: dict[str, int] = field(default_factory=dict)  # tokens found in the prefix cache


def drive(
    llm: Any,
    prompts: Sequence[Any],
    params: Any,
    *,
    arrivals: Sequence[int] | None = None,
    aborts: Mapping[int, str] | None = None,
    max_steps: int = 10**6,
) -> Story:
    """Runs requests "0", "1", .. that arrive at the given steps; `aborts`: step -> request.

    After `max_steps` the requests are left where they are.
    """
    engine = llm.llm_engine
    waiting = list(enumerate(arrivals or [0] * len(prompts)))
    aborts = dict(aborts or {})
    story = Story()
    while (waiting or engine.has_unfinished_requests()) and story.steps < max_steps:
        for index, step in list(waiting):
            if step <= story.steps:
                prompt = prompts[index]
                if not isinstance(prompt, str):
                    prompt = {"prompt_token_ids": list(prompt)}
                chosen = params[index] if isinstance(params, list) else params
                engine.add_request(str(index), prompt, chosen)
                waiting.remove((index, step))
        if story.steps in aborts:
            engine.abort_request([aborts[story.steps]])
        for output in engine.step():
            name, completion = output.request_id, output.outputs[0]
            story.tokens[name] = list(completion.token_ids)
            story.outputs[name] = completion
            story.lengths.setdefault(name, []).append(len(completion.token_ids))
            story.cached[name] = output.num_cached_tokens or 0
            if output.finished:
                story.finished[name] = str(completion.finish_reason)
        story.steps += 1
    return story


def own_engine():
    """Our side of the newest engine."""
    from nwor_specpv.vllm.registry import current_engine

    engine = current_engine()
    assert engine is not None
    return engine


def stats() -> dict[str, Any]:
    return own_engine().interceptor.stats()


def counted(llm: Any, name: str) -> float:
    """The value of one of vLLM's own counters."""
    return sum(m.value for m in llm.get_metrics() if m.name == name)


def caches() -> dict[str, Any]:
    """Copies of the target model's K/V caches by layer."""
    return {name: own_engine().layers[name].kv_cache.clone() for name in own_engine().own_layers}


def release_engines() -> None:
    """Engines that nobody uses are gone: their caches are not small.

    An engine freezes what vLLM has read from the environment; the next one reads it anew. Engines
    keep their graphs in one pool of memory. torch lets no graph into a pool that has lost all its
    graphs while some of its memory is in use, so those to come have another. Workspaces of cuBLAS,
    too: they would be freed at the next capture, while vLLM measures what is free.
    """
    gc.unfreeze()  # vLLM has hidden all of an engine from the collector
    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    if "vllm.platforms" in sys.modules:
        type(sys.modules["vllm.platforms"].current_platform)._global_graph_pool = None
    if "vllm.envs" in sys.modules:
        sys.modules["vllm.envs"].disable_envs_cache()
