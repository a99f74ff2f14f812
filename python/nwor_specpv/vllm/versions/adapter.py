"""What a version of vLLM has in its own way: one frozen object per version, chosen once.

A field that is a `VllmFunction`, `VllmFields` or `VllmNames` names something of vLLM that the
plugin wraps, replaces, overrides, calls or reads. `sources` compares all of them with a release.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .functions import VllmFields, VllmFunction, VllmNames

ARGUMENTS = "vllm.engine.arg_utils"
CONFIG = "vllm.config.vllm"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
SCHEDULER = "vllm.v1.core.sched.scheduler"
SPECULATORS = "vllm.v1.worker.gpu.spec_decode"
MODEL_STATES = "vllm.v1.worker.gpu.model_states"
ATTENTION = "vllm.v1.attention.backend"
FLASH = "vllm.v1.attention.backends.flash_attn"
FLASH_CALLS = "vllm.vllm_flash_attn.flash_attn_interface"
CPU = "vllm.v1.attention.backends.cpu_attn"
WORKERS = ("vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker")

_WRITE = ("self", "layer", "key", "value", "kv_cache", "slot_mapping")
_ATTEND = (
    *("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
    *("output_scale", "output_block_scale"),
)
_BUILD = ("self", "common_prefix_len", "common_attn_metadata", "fast_build")

# Parameters of a speculator's `propose` that every version has, in this order.
PROPOSED = (
    *("self", "input_batch", "attn_metadata", "slot_mappings", "last_hidden_states"),
    *("aux_hidden_states", "num_sampled", "num_rejected", "last_sampled", "next_prefill_tokens"),
    *("temperature", "seeds"),
)


@dataclass(frozen=True, kw_only=True)
class Adapter(ABC):
    """One version. Defaults are what all versions share."""

    version: str
    # How a cache is laid out: a name of nwor_specpv.LAYOUTS.
    cache_layout: str = "packed"
    # Whether FlashAttention-3's combine ends after the attention before it, also where no request
    # has several splits: it resets the scheduler's semaphore. To be read in its source.
    flash_combine_waits: bool = False
    # Tokens of a page of the CPU backend are a multiple of this.
    cpu_page: int
    # Whether the offloading connector saves blocks that end with a request's last token.
    offloads_last_token: bool = False

    # ---- what is wrapped or replaced ----

    # Makes an engine's configuration of its arguments, and within it that of speculation.
    make_config: VllmFunction = VllmFunction(
        ARGUMENTS, "EngineArgs.create_engine_config", ("self", "usage_context", "headless")
    )
    make_speculation: VllmFunction = VllmFunction(
        ARGUMENTS,
        "EngineArgs.create_speculative_config",
        ("self", "target_model_config", "target_parallel_config"),
    )
    # Chooses the rows of CUDA graphs.
    choose_graphs: VllmFunction = VllmFunction(CONFIG, "VllmConfig._set_cudagraph_sizes", ("self",))
    # Says whether model runner V2 is the one for this model, unless the user has chosen. None: V2
    # is for every model.
    prefers_runner_v2: VllmFunction | None = None
    # Lists what model runner V2 does not support, and the entry for drafters by n-grams in it.
    # None: there is no such entry.
    unsupported_by_v2: VllmFunction | None = None
    ngram_on_v2: str = ""
    # Called with the plan of a step, before anything else of it.
    plan_step_v1: VllmFunction = VllmFunction(
        RUNNER_V1, "GPUModelRunner._update_states", ("self", "scheduler_output")
    )
    plan_step_v2: VllmFunction = VllmFunction(
        RUNNER_V2, "GPUModelRunner.add_requests", ("self", "scheduler_output")
    )
    # Asked whether a step may run as a full CUDA graph.
    is_uniform_v1: VllmFunction = VllmFunction(
        RUNNER_V1,
        "GPUModelRunner._is_uniform_decode",
        (
            *("max_num_scheduled_tokens", "uniform_decode_query_len", "num_tokens", "num_reqs"),
            "force_uniform_decode",
        ),
    )
    uniform_rows_v2: VllmFunction
    # Called when the order of a step's requests is known.
    order_requests_v2: VllmFunction
    # Called after every sampling step, before the drafter: acceptance is known.
    after_sampling_v1: VllmFunction = VllmFunction(
        RUNNER_V1,
        "GPUModelRunner._update_states_after_model_execute",
        ("self", "output_token_ids", "scheduler_output"),
    )
    after_sampling_v2: VllmFunction = VllmFunction(
        RUNNER_V2,
        "GPUModelRunner.postprocess_sampled",
        ("self", "idx_mapping", "sampled_tokens", "num_sampled", "num_rejected", "query_start_loc"),
    )
    # Samples a step's tokens and has the speculator draft.
    end_step_v2: VllmFunction = VllmFunction(
        RUNNER_V2, "GPUModelRunner.sample_tokens", ("self", "grammar_output")
    )
    # Builds the speculator of model runner V2, which imports it by name.
    make_speculator: VllmFunction
    # Lists the batches that a manager of CUDA graphs has graphs for.
    list_graphs: VllmFunction = VllmFunction(GRAPHS, "CudaGraphManager._init_candidates", ("self",))
    # Publishes blocks of a request to the prefix cache.
    publish_blocks: VllmFunction = VllmFunction(
        "vllm.v1.core.kv_cache_coordinator",
        "KVCacheCoordinator.cache_blocks",
        ("self", "request", "num_computed_tokens"),
    )

    # Draft trees, on model runner V2.
    # Gives the rows of a step their slots, by their positions.
    place_rows_v2: VllmFunction = VllmFunction(
        RUNNER_V2, "GPUModelRunner.prepare_attn", ("self", "input_batch")
    )
    # Called with the index of a request that begins.
    begin_request_v2: VllmFunction = VllmFunction(
        f"{MODEL_STATES}.default",
        "DefaultModelState.add_request",
        ("self", "req_index", "new_req_data"),
    )
    # Runs a step of as many drafts as there may be, for full batches, before the first request.
    warm_up_v2: VllmFunction = VllmFunction(
        "vllm.v1.worker.gpu_worker",
        "warmup_kernels",
        ("model_runner", "worker_execute_model", "worker_sample_tokens"),
    )
    # Asked for samplers in the place of vLLM's own.
    make_samplers_v2: VllmFunction = VllmFunction(
        f"{MODEL_STATES}.interface", "ModelState.custom_sampler", ("self", "sampler")
    )

    # ---- what is overridden or called ----

    write_flash: VllmFunction = VllmFunction(FLASH, "FlashAttentionImpl.do_kv_cache_update", _WRITE)
    attend_flash: VllmFunction = VllmFunction(FLASH, "FlashAttentionImpl.forward", _ATTEND)
    build_flash: VllmFunction = VllmFunction(FLASH, "FlashAttentionMetadataBuilder.build", _BUILD)
    # FlashAttention itself: attention over prefixes, and its plan.
    call_flash: VllmNames = VllmNames(
        FLASH_CALLS,
        "flash_attn_varlen_func",
        (
            *("q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k"),
            *("softmax_scale", "causal", "block_table", "softcap", "return_softmax_lse"),
            *("scheduler_metadata", "num_splits", "fa_version"),
            *("q_descale", "k_descale", "v_descale"),
        ),
    )
    plan_flash: VllmNames = VllmNames(
        FLASH_CALLS,
        "get_scheduler_metadata",
        (
            *("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv"),
            *("headdim", "cache_seqlens", "qkv_dtype", "cu_seqlens_q", "page_size", "causal"),
            *("num_splits", "sm_margin"),
        ),
    )
    # What is read and set of its builder, of the metadata that it builds, and of a layer.
    flash_builder: VllmNames = VllmNames(
        FLASH,
        "FlashAttentionMetadataBuilder",
        (
            *("aot_schedule", "aot_sliding_window", "max_num_splits", "scheduler_metadata"),
            *("use_full_cuda_graph", "max_cudagraph_size", "num_heads_q", "num_heads_kv"),
            *("headdim", "block_size", "kv_cache_dtype", "supports_update_block_table"),
        ),
    )
    flash_metadata: VllmNames = VllmNames(
        FLASH, "FlashAttentionMetadata", ("scheduler_metadata", "max_num_splits")
    )
    flash_layer: VllmNames = VllmNames(
        FLASH,
        "FlashAttentionImpl",
        (
            *("num_heads", "num_kv_heads", "head_size", "scale", "sliding_window"),
            *("kv_cache_dtype", "logits_soft_cap", "vllm_flash_attn_version"),
        ),
    )
    write_cpu: VllmFunction = VllmFunction(
        CPU, "CPUAttentionBackendImpl.do_kv_cache_update", _WRITE
    )
    attend_cpu: VllmFunction = VllmFunction(CPU, "CPUAttentionBackendImpl.forward", _ATTEND)
    build_cpu: VllmFunction = VllmFunction(CPU, "CPUAttentionMetadataBuilder.build", _BUILD)
    # What a backend says of itself. With a flag that nobody has read, vLLM may go past our write.
    backend_flags: VllmFields = VllmFields(
        ATTENTION,
        "AttentionBackend",
        ("supported_dtypes", "supported_kv_cache_dtypes", "forward_includes_kv_cache_update"),
    )
    # What builders are told of a step. A field that nobody has read may have to be cut in two.
    step_metadata: VllmFields
    schedule_drafts: VllmFunction = VllmFunction(
        "vllm.v1.core.sched.async_scheduler",
        "AsyncScheduler._update_after_schedule",
        ("self", "scheduler_output"),
    )
    take_drafts: VllmFunction = VllmFunction(
        SCHEDULER,
        "Scheduler.update_draft_token_ids",
        ("self", "draft_token_ids"),
    )
    # Plans a step.
    plan_step: VllmFunction = VllmFunction(
        SCHEDULER, "Scheduler.schedule", ("self", "throttle_prefills")
    )
    preempt_request: VllmFunction
    take_output: VllmFunction = VllmFunction(
        SCHEDULER,
        "Scheduler.update_from_output",
        ("self", "scheduler_output", "model_runner_output"),
    )
    # Returns a step's output, in the worker's process.
    end_step: VllmFunction = VllmFunction(
        "vllm.v1.worker.gpu_worker", "Worker.sample_tokens", ("self", "grammar_output")
    )
    propose: VllmFunction
    copy_inputs: VllmFunction
    set_attention: VllmFunction = VllmFunction(
        f"{SPECULATORS}.speculator",
        "DraftModelSpeculator.set_attn",
        (
            *("self", "model_state", "kv_cache_config", "block_tables", "target_input_buffers"),
            "target_attn_groups",
        ),
    )
    sample: VllmFunction  # draws tokens
    capture_head: VllmFunction  # of speculators' managers of CUDA graphs
    # Spreads a head's logits over the target's vocabulary. What it is given is read instead.
    head_logits: VllmFunction = VllmFunction(
        "vllm.model_executor.models.llama_eagle3",
        "Eagle3LlamaForCausalLM.compute_logits",
        ("self", "hidden_states"),
    )
    # Draft trees: what draws a head's drafts, what judges them, how a row's logits become what its
    # token is drawn from, and what tells the log-probabilities of emitted tokens.
    draw_draft: VllmFunction
    judge_drafts: VllmFunction
    apply_sampling: VllmFunction
    tell_log_probs: VllmFunction

    # Fields of `step_metadata` with an entry for each request, and for each row.
    of_requests: tuple[str, ...]
    of_rows: tuple[str, ...] = ("slot_mapping", "positions")
    # Whether a token that is drawn for a column of the draft logits has noise of that column.
    noise_by_column: bool = False

    def parts(self) -> Iterator[VllmFunction | VllmFields | VllmNames]:
        """Everything of vLLM that this version was read for."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, VllmFunction | VllmFields | VllmNames):
                yield value
        yield from map(self.end_of_start, WORKERS)
        yield from map(self.measure_memory, WORKERS)

    @staticmethod
    def end_of_start(worker_class: str) -> VllmFunction:
        """The method of this worker class that ends the start of an engine."""
        module, _, owner = worker_class.rpartition(".")
        return VllmFunction(module, f"{owner}.compile_or_warm_up_model", ("self",))

    @staticmethod
    def measure_memory(worker_class: str) -> VllmFunction:
        """The method of this worker class that says how many bytes caches may take."""
        module, _, owner = worker_class.rpartition(".")
        return VllmFunction(module, f"{owner}.determine_available_memory", ("self",))

    # ---- the state of model runner V2 ----

    @staticmethod
    def texts_of(runner: Any) -> torch.Tensor:
        """[requests, tokens] int32: the text of every request that model runner V2 knows, by index.
        On a GPU it may be host memory that the device reads."""
        return runner.req_states.all_token_ids.gpu

    @staticmethod
    def sampling_of(runner: Any) -> Any:
        """Temperatures, top-k, top-p and min-p of model runner V2's requests by index, each as `np`
        on the host and as `gpu`, which the device reads."""
        return runner.sampler.sampling_states

    @abstractmethod
    def names_of(self, runner: Any, scheduler_output: Any, *more: Any) -> Sequence[str]:
        """The requests of a step in their order, from what `order_requests_v2` is called with."""

    @abstractmethod
    def scheduled_drafts(self, *more: Any) -> Sequence[int] | None:
        """Drafts of each request of a step in their order, from what `order_requests_v2` is called
        with. None: this version does not say."""

    @staticmethod
    def wanted_drafts(scheduler_output: Any) -> int:
        """Drafts that the scheduler wants for the next step."""
        return scheduler_output.num_spec_tokens_to_schedule

    @abstractmethod
    def preempt(self, scheduler: Any, request: Any) -> None:
        """Has a request computed again. It was taken from the running ones, and none of its outputs
        that are on their way will be processed."""

    @abstractmethod
    def page_size(self, block_tables: Any, group: int) -> int:
        """Tokens of a page in model runner V2's tables of a cache group."""

    # ---- drafting on model runner V2 ----

    def speculator_graphs(self) -> Any:
        """The class of speculators' managers of CUDA graphs."""
        owner = self.capture_head.path.partition(".")[0]
        return getattr(importlib.import_module(self.capture_head.module), owner)

    @abstractmethod
    def offered(
        self, vllm_config: Any, drafts: Sequence[int]
    ) -> contextlib.AbstractContextManager[None]:
        """While it lasts, vLLM lists and captures CUDA graphs for all these numbers of drafts."""

    @abstractmethod
    def likeliest(self, speculator: Any, hidden: torch.Tensor) -> torch.Tensor:
        """The head's likeliest tokens, as vLLM finds them."""

    @abstractmethod
    def draw(
        self,
        sample: Callable[..., torch.Tensor],
        log_probs: torch.Tensor,
        owners: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        *,
        use_fp64: bool,
        kept: torch.Tensor | None,
        columns: torch.Tensor | None,
    ) -> torch.Tensor:
        """Tokens drawn by vLLM's `sample` from `log_probs` [rows, vocabulary].

        `kept` [requests, drafts, vocabulary] float32: where vLLM's sampler looks for what they were
        drawn from, at `columns` [rows]; None: nowhere.
        """

    # ---- draft trees: vLLM's sampler over the rows of a step ----

    @abstractmethod
    def processed(
        self,
        sampler: Any,
        logits: torch.Tensor,
        input_batch: Any,
        tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """What vLLM's `sampler` draws from after rows with these `tokens`, at `positions`."""

    @abstractmethod
    def draw_of_target(
        self,
        sample: Callable[..., torch.Tensor],
        sampler: Any,
        processed: torch.Tensor,
        input_batch: Any,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """The tokens that plain decoding draws after these rows, by vLLM's `sample`."""

    @abstractmethod
    def log_probs(
        self,
        judge: Any,
        input_batch: Any,
        emitted: torch.Tensor,
        counts: torch.Tensor,
        logits: torch.Tensor,
    ) -> Any:
        """Log-probabilities of what was emitted, from the rejection sampler `judge`. `logits`: of
        each request's rows, those that it was emitted after first. None: nobody wants them."""

    # ---- a head's window in mode `refresh` ----

    @abstractmethod
    def windowed(self, impl: Any, metadata: Any, window: tuple[int, int]) -> Any:
        """Metadata for one call of FlashAttention's layer `impl` that sees this window."""


@contextlib.contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """While it lasts, the attribute has this value."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)
