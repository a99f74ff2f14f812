"""What is particular to vLLM 0.26."""

from __future__ import annotations

from typing import Any

import torch

from .functions import VllmFunction

# Read and run: see docs/vllm_validation.md.
SUPPORTED = ("0.26.0",)

# How a cache is laid out: a name of nwor_specpv.LAYOUTS.
CACHE_LAYOUT = "packed"

ARGUMENTS = "vllm.engine.arg_utils"
CONFIG = "vllm.config.vllm"
# Makes an engine's configuration of its arguments, and within it that of speculation.
MAKE_CONFIG = VllmFunction(
    ARGUMENTS, "EngineArgs.create_engine_config", ("self", "usage_context", "headless")
)
MAKE_SPECULATION = VllmFunction(
    ARGUMENTS,
    "EngineArgs.create_speculative_config",
    ("self", "target_model_config", "target_parallel_config"),
)
# Chooses the rows of CUDA graphs.
CHOOSE_GRAPHS = VllmFunction(CONFIG, "VllmConfig._set_cudagraph_sizes", ("self",))
# Says whether model runner V2 is the one for this model, unless the user has chosen.
PREFERS_RUNNER_V2 = VllmFunction(CONFIG, "VllmConfig._is_default_v2_model_runner_model", ("self",))

RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"

# Called with the plan of a step, before anything else of it.
PLAN_STEP_V1 = VllmFunction(
    RUNNER_V1, "GPUModelRunner._update_states", ("self", "scheduler_output")
)
PLAN_STEP_V2 = VllmFunction(RUNNER_V2, "GPUModelRunner.add_requests", ("self", "scheduler_output"))
# Asked whether a step may run as a full CUDA graph.
IS_UNIFORM_V1 = VllmFunction(
    RUNNER_V1,
    "GPUModelRunner._is_uniform_decode",
    (
        "max_num_scheduled_tokens",
        "uniform_decode_query_len",
        "num_tokens",
        "num_reqs",
        "force_uniform_decode",
    ),
)
UNIFORM_ROWS_V2 = VllmFunction(
    RUNNER_V2, "get_uniform_token_count", ("num_reqs", "num_tokens", "max_query_len")
)
# Orders the requests of a step, as its module's `sort_batch_req_ids` does.
ORDER_REQUESTS_V2 = VllmFunction(
    RUNNER_V2, "GPUModelRunner.prepare_inputs", ("self", "scheduler_output", "batch_desc")
)
# Called after every sampling step, before the drafter: acceptance is known.
AFTER_SAMPLING_V1 = VllmFunction(
    RUNNER_V1,
    "GPUModelRunner._update_states_after_model_execute",
    ("self", "output_token_ids", "scheduler_output"),
)
AFTER_SAMPLING_V2 = VllmFunction(
    RUNNER_V2,
    "GPUModelRunner.postprocess_sampled",
    ("self", "idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "query_start_loc"),
)
# Builds the speculator of model runner V2, which imports it by name.
MAKE_SPECULATOR = VllmFunction(
    "vllm.v1.worker.gpu.spec_decode", "init_speculator", ("vllm_config", "device")
)
# Lists what model runner V2 does not support, and the entry for drafters by n-grams in it.
UNSUPPORTED_BY_V2 = VllmFunction(
    "vllm.config.vllm", "VllmConfig._get_v2_model_runner_unsupported_features", ("self",)
)
NGRAM_ON_V2 = "ngram/ngram_gpu speculative decoding"
# Publishes blocks of a request to the prefix cache: a method of the cache's coordinator.
PUBLISH_BLOCKS = ("self", "request", "num_computed_tokens")


def texts_of(runner: Any) -> torch.Tensor:
    """[requests, tokens] int32: the text of every request that model runner V2 knows, by index.
    On a GPU it is host memory that the device reads."""
    return runner.req_states.all_token_ids.gpu


def sampling_of(runner: Any) -> Any:
    """Temperatures, top-k, top-p and min-p of model runner V2's requests by index, each as `np` on
    the host and as `gpu`, which the device reads."""
    return runner.sampler.sampling_states


def end_of_start(worker_class: str) -> VllmFunction:
    """The method of this worker class that ends the start of an engine."""
    module, _, owner = worker_class.rpartition(".")
    return VllmFunction(module, f"{owner}.compile_or_warm_up_model", ("self",))
