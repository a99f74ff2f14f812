"""What is particular to vLLM 0.32."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .adapter import (
    ATTENTION,
    GRAPHS,
    PROPOSED,
    RUNNER_V2,
    SCHEDULER,
    SPECULATORS,
    Adapter,
    replaced,
)
from .functions import VllmFields, VllmFunction

_SPECULATOR_GRAPHS = f"{SPECULATORS}.target_dependent_ar.cudagraph_utils"
_LOOKUP = "build_dynamic_sd_schedule_lookup"
_LOOKUP_PARAMETERS = (
    *("num_speculative_tokens_per_batch_size", "vllm_max_batch_size"),
    "vllm_num_speculative_tokens",
)


@dataclass(frozen=True, kw_only=True)
class Vllm032(Adapter):
    version: str = "0.32.0"
    cpu_page: int = 32

    uniform_rows_v2: VllmFunction = VllmFunction(
        RUNNER_V2,
        "get_uniform_decode_token_count",
        ("num_reqs", "num_tokens", "max_query_len", "decode_graph_eligible"),
    )
    order_requests_v2: VllmFunction = VllmFunction(
        RUNNER_V2,
        "GPUModelRunner.prepare_inputs",
        ("self", "scheduler_output", "batch_req_state", "batch_desc", "num_active_loras"),
    )
    make_speculator: VllmFunction = VllmFunction(
        SPECULATORS, "init_speculator", ("vllm_config", "device", "req_states")
    )
    # The order of a step's requests, and their drafts.
    batch_state: VllmFields = VllmFields(
        RUNNER_V2,
        "BatchReqState",
        (
            *("req_ids", "num_scheduled_tokens", "num_tokens", "num_draft_tokens_np"),
            *("idx_mapping_np", "prefill_len_np", "num_computed_prefill_tokens_np"),
            *("is_prefilling_np", "max_seq_len_np", "has_prefill", "prefill_runs_as_decode_np"),
            "decode_graph_eligible",
        ),
    )
    step_metadata: VllmFields = VllmFields(
        ATTENTION,
        "CommonAttentionMetadata",
        (
            *("query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs"),
            *("num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor"),
            *("slot_mapping", "causal", "logits_indices_padded", "num_logits_indices"),
            *("max_logits_per_req", "encoder_seq_lens", "encoder_seq_lens_cpu"),
            *("dcp_local_seq_lens", "dcp_local_seq_lens_cpu_upper_bound", "positions"),
            *("is_prefilling", "seq_lens_cpu_upper_bound", "req_idx", "mm_req_doc_ranges"),
            *("rswa_prefix_lens", "replayssm_decode_base_cpu", "_num_computed_tokens_cache"),
            "_token_to_req_indices_cache",
        ),
    )
    of_requests: tuple[str, ...] = (
        *("seq_lens", "block_table_tensor", "encoder_seq_lens", "encoder_seq_lens_cpu"),
        *("dcp_local_seq_lens", "dcp_local_seq_lens_cpu_upper_bound", "is_prefilling"),
        *("seq_lens_cpu_upper_bound", "req_idx", "rswa_prefix_lens", "replayssm_decode_base_cpu"),
    )
    preempt_request: VllmFunction = VllmFunction(
        SCHEDULER,
        "Scheduler._preempt_request",
        ("self", "request", "timestamp", "drop_stale_output"),
    )
    propose: VllmFunction = VllmFunction(
        f"{SPECULATORS}.speculator",
        "BaseSpeculator.propose",
        (
            *PROPOSED,
            *("dp_sync_state", "dummy_run", "skip_attn_for_dummy_run", "mm_inputs", "is_profile"),
            "num_speculative_tokens",
        ),
    )
    copy_inputs: VllmFunction = VllmFunction(
        f"{SPECULATORS}.speculator",
        "DraftModelSpeculator._copy_request_inputs",
        ("self", "num_reqs", "idx_mapping", "temperature", "seeds", "dummy_run"),
    )
    sample: VllmFunction = VllmFunction(
        "vllm.v1.worker.gpu.sample.gumbel",
        "gumbel_sample",
        (
            *("logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature"),
            *("is_drafting", "logits_cache", "logits_cache_col", "use_fp64", "logits_cache_source"),
        ),
    )
    # Says how many drafts each batch size has; both modules import it by name.
    look_up_drafts: VllmFunction = VllmFunction(GRAPHS, _LOOKUP, _LOOKUP_PARAMETERS)
    look_up_head_drafts: VllmFunction = VllmFunction(
        _SPECULATOR_GRAPHS, _LOOKUP, _LOOKUP_PARAMETERS
    )
    capture_head: VllmFunction = VllmFunction(
        _SPECULATOR_GRAPHS,
        "SpeculatorCudaGraphManager.capture",
        (
            *("self", "forward_fn", "model_state", "input_buffers", "block_tables", "attn_groups"),
            *("kv_cache_config", "progress_bar_desc", "specialize_spec_tokens"),
        ),
    )
    draw_draft: VllmFunction = VllmFunction(
        f"{SPECULATORS}.speculator",
        "DraftModelSpeculator.sample_draft",
        (
            *("self", "hidden_states", "sample_src_positions", "idx_mapping", "temperature"),
            *("seeds", "draft_step", "draft_logits", "spec_step_idx"),
        ),
    )
    judge_drafts: VllmFunction = VllmFunction(
        f"{SPECULATORS}.rejection_sampler",
        "RejectionSampler.__call__",
        ("self", "logits", "input_batch", "draft_logits", "invalid_drafts"),
    )
    apply_sampling: VllmFunction = VllmFunction(
        "vllm.v1.worker.gpu.sample.sampler",
        "Sampler.apply_sampling_params",
        (
            *("self", "logits", "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos"),
            *("input_ids", "expanded_local_pos", "seq_lens_upper_bound_np", "skip_top_k_top_p"),
        ),
    )
    tell_log_probs: VllmFunction = VllmFunction(
        f"{SPECULATORS}.rejection_sampler",
        "RejectionSampler._get_logprobs_tensors",
        (
            *("self", "sampled", "num_sampled", "logits", "cu_num_logits", "cu_num_logits_np"),
            "max_num_logprobs",
        ),
    )

    def names_of(self, runner: Any, scheduler_output: Any, *more: Any) -> Sequence[str]:
        return more[0].req_ids

    def scheduled_drafts(self, *more: Any) -> Sequence[int] | None:
        found = more[0].num_draft_tokens_np
        return [0] * len(more[0].req_ids) if found is None else found.tolist()

    def preempt(self, scheduler: Any, request: Any) -> None:
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)

    def page_size(self, block_tables: Any, group: int) -> int:
        return block_tables.block_sizes[group]

    @contextlib.contextmanager
    def offered(self, vllm_config: Any, drafts: Sequence[int]) -> Iterator[None]:
        """vLLM takes one number for each batch size, so the function that looks them up answers
        with ours."""
        speculative, limit = vllm_config.speculative_config, max(drafts)
        most = vllm_config.scheduler_config.max_num_seqs
        ranges = [(1, most, limit)]
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                replaced(speculative, "num_speculative_tokens_per_batch_size", ranges)
            )
            for name in (GRAPHS, _SPECULATOR_GRAPHS):
                module = importlib.import_module(name)
                stack.enter_context(replaced(module, _LOOKUP, lambda *_, **__: [0, *drafts]))
            yield

    def likeliest(self, speculator: Any, hidden: torch.Tensor) -> torch.Tensor:
        if speculator.use_local_argmax_reduction:
            return speculator.get_draft_top_tokens(hidden, 0)
        return speculator.compute_draft_logits(hidden, 0).argmax(dim=-1)

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
        """vLLM keeps logits as they are before temperature. It divides them by it when it draws and
        when it verifies."""
        heat = temperature[owners.clamp(min=0).long()][:, None]
        told = {"logits_cache": kept, "logits_cache_col": columns}
        return sample(
            log_probs * torch.where(heat > 0, heat, 1),
            owners,
            temperature,
            seeds,
            positions,
            apply_temperature=True,
            is_drafting=True,
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
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            positions,
            tokens,
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
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
            is_drafting=False,
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
        return judge._get_logprobs_tensors(
            emitted,
            counts,
            logits,
            input_batch.cu_num_logits,
            input_batch.cu_num_logits_np,
            judge.sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np),
        )

    def windowed(self, impl: Any, metadata: Any, window: tuple[int, int]) -> Any:
        """The window is the layer's."""
        impl.sliding_window = window
        return metadata


ADAPTER = Vllm032()
