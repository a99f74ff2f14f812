"""What is particular to vLLM 0.26."""

from __future__ import annotations

import contextlib
import copy
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .adapter import (
    ATTENTION,
    CONFIG,
    FLASH,
    PROPOSED,
    RUNNER_V2,
    SCHEDULER,
    SPECULATORS,
    Adapter,
    replaced,
)
from .functions import VllmFields, VllmFunction, VllmNames


@dataclass(frozen=True, kw_only=True)
class Vllm026(Adapter):
    version: str = "0.26.0"
    cpu_page: int = 16
    flash_combine_waits: bool = True
    offloads_last_token: bool = True

    prefers_runner_v2: VllmFunction | None = VllmFunction(
        CONFIG, "VllmConfig._is_default_v2_model_runner_model", ("self",)
    )
    unsupported_by_v2: VllmFunction | None = VllmFunction(
        CONFIG, "VllmConfig._get_v2_model_runner_unsupported_features", ("self",)
    )
    ngram_on_v2: str = "ngram/ngram_gpu speculative decoding"
    uniform_rows_v2: VllmFunction = VllmFunction(
        RUNNER_V2, "get_uniform_token_count", ("num_reqs", "num_tokens", "max_query_len")
    )
    # Orders the requests as its module's `sort_batch_req_ids` does.
    order_requests_v2: VllmFunction = VllmFunction(
        RUNNER_V2, "GPUModelRunner.prepare_inputs", ("self", "scheduler_output", "batch_desc")
    )
    make_speculator: VllmFunction = VllmFunction(
        SPECULATORS, "init_speculator", ("vllm_config", "device")
    )
    step_metadata: VllmFields = VllmFields(
        ATTENTION,
        "CommonAttentionMetadata",
        (
            *("query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs"),
            *("num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor"),
            *("slot_mapping", "causal", "logits_indices_padded", "num_logits_indices"),
            *("encoder_seq_lens", "encoder_seq_lens_cpu", "dcp_local_seq_lens"),
            *("dcp_local_seq_lens_cpu", "positions", "is_prefilling", "seq_lens_cpu_upper_bound"),
            *("mm_req_doc_ranges", "rswa_prefix_lens", "_seq_lens_cpu", "_num_computed_tokens_cpu"),
            *("_num_computed_tokens_cache", "_token_to_req_indices_cache"),
        ),
    )
    flash_metadata: VllmNames = VllmNames(
        FLASH,
        "FlashAttentionMetadata",
        ("scheduler_metadata", "max_num_splits", "sliding_window"),
    )
    of_requests: tuple[str, ...] = (
        *("seq_lens", "block_table_tensor", "encoder_seq_lens", "encoder_seq_lens_cpu"),
        *("dcp_local_seq_lens", "dcp_local_seq_lens_cpu", "is_prefilling"),
        *("seq_lens_cpu_upper_bound", "rswa_prefix_lens"),
        *("_seq_lens_cpu", "_num_computed_tokens_cpu"),
    )
    preempt_request: VllmFunction = VllmFunction(
        SCHEDULER, "Scheduler._preempt_request", ("self", "request", "timestamp")
    )
    propose: VllmFunction = VllmFunction(
        f"{SPECULATORS}.speculator",
        "BaseSpeculator.propose",
        (
            *PROPOSED,
            *("num_tokens_across_dp", "dummy_run", "skip_attn_for_dummy_run", "mm_inputs"),
            "is_profile",
        ),
    )
    copy_inputs: VllmFunction = VllmFunction(
        f"{SPECULATORS}.speculator",
        "DraftModelSpeculator._copy_request_inputs",
        ("self", "num_reqs", "idx_mapping", "temperature", "seeds"),
    )
    sample: VllmFunction = VllmFunction(
        "vllm.v1.worker.gpu.sample.gumbel",
        "gumbel_sample",
        (
            *("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature"),
            *("output_processed_logits", "output_processed_logits_col", "use_fp64"),
        ),
    )
    capture_head: VllmFunction = VllmFunction(
        f"{SPECULATORS}.autoregressive.cudagraph_utils",
        "SpeculatorCudaGraphManager.capture",
        (
            *("self", "forward_fn", "model_state", "input_buffers", "block_tables", "attn_groups"),
            *("kv_cache_config", "progress_bar_desc"),
        ),
    )

    draw_draft: VllmFunction = VllmFunction(
        f"{SPECULATORS}.speculator",
        "DraftModelSpeculator.sample_draft",
        (
            *("self", "hidden_states", "positions", "idx_mapping", "temperature", "seeds"),
            *("draft_step", "draft_logits"),
        ),
    )
    judge_drafts: VllmFunction = VllmFunction(
        f"{SPECULATORS}.rejection_sampler",
        "RejectionSampler.__call__",
        ("self", "logits", "input_batch", "draft_logits"),
    )
    apply_sampling: VllmFunction = VllmFunction(
        "vllm.v1.worker.gpu.sample.sampler",
        "Sampler.apply_sampling_params",
        (
            *("self", "logits", "expanded_idx_mapping", "idx_mapping_np", "pos", "input_ids"),
            *("expanded_local_pos", "skip_top_k_top_p"),
        ),
    )
    tell_log_probs: VllmFunction = VllmFunction(
        f"{SPECULATORS}.rejection_sampler",
        "RejectionSampler._get_logprobs_tensors",
        ("self", "input_batch", "sampled", "num_sampled", "logits"),
    )

    def names_of(self, runner: Any, scheduler_output: Any, *more: Any) -> Sequence[str]:
        module = importlib.import_module(RUNNER_V2)
        rows_by_name = scheduler_output.num_scheduled_tokens
        return module.sort_batch_req_ids(rows_by_name, runner.decode_query_len)

    def scheduled_drafts(self, *more: Any) -> Sequence[int] | None:
        return None

    def preempt(self, scheduler: Any, request: Any) -> None:
        scheduler._preempt_request(request, time.monotonic())
        request.num_output_placeholders = 0  # vLLM expects outputs that are on their way

    def page_size(self, block_tables: Any, group: int) -> int:
        return block_tables.kernel_block_sizes[group]

    def offered(
        self, vllm_config: Any, drafts: Sequence[int]
    ) -> contextlib.AbstractContextManager[None]:
        """Ranges of batch sizes may overlap: each has graphs of its own."""
        most = vllm_config.scheduler_config.max_num_seqs
        ranges = [(1, most, number) for number in drafts]
        speculative = vllm_config.speculative_config
        return replaced(speculative, "num_speculative_tokens_per_batch_size", ranges)

    def likeliest(self, speculator: Any, hidden: torch.Tensor) -> torch.Tensor:
        return speculator._greedy_sample_draft(hidden)

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
        """vLLM keeps logits as they are after temperature."""
        told = {"output_processed_logits": kept, "output_processed_logits_col": columns}
        return sample(
            log_probs,
            owners,
            temperature,
            seeds,
            positions,
            apply_temperature=False,
            use_fp64=use_fp64,
            **(told if kept is not None else {}),
        )

    def processed(
        self,
        sampler: Any,
        logits: torch.Tensor,
        input_batch: Any,
        tokens: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        return sampler.apply_sampling_params(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping_np,
            positions,
            tokens,
            input_batch.expanded_local_pos,
        )

    def draw_of_target(
        self,
        sample: Callable[..., torch.Tensor],
        sampler: Any,
        processed: torch.Tensor,
        input_batch: Any,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        return sample(
            processed,
            input_batch.expanded_idx_mapping,
            sampler.sampling_states.temperature.gpu,
            sampler.sampling_states.seeds.gpu,
            positions,
            apply_temperature=False,
            use_fp64=sampler.use_fp64_gumbel,
        )

    def log_probs(
        self,
        judge: Any,
        input_batch: Any,
        emitted: torch.Tensor,
        counts: torch.Tensor,
        logits: torch.Tensor,
    ) -> Any:
        return judge._get_logprobs_tensors(input_batch, emitted, counts, logits)

    def windowed(self, impl: Any, metadata: Any, window: tuple[int, int]) -> Any:
        """The window is the metadata's."""
        shortened = copy.copy(metadata)
        shortened.sliding_window = window
        return shortened


ADAPTER = Vllm026()
