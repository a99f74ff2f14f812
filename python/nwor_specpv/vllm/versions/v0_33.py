"""What is particular to vLLM 0.33. It was read; no CPU build of it exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .adapter import ATTENTION, RUNNER_V2, SPECULATORS
from .functions import VllmFields, VllmFunction
from .v0_32 import Vllm032


@dataclass(frozen=True, kw_only=True)
class Vllm033(Vllm032):
    version: str = "0.33.0"

    after_sampling_v2: VllmFunction = VllmFunction(
        RUNNER_V2,
        "GPUModelRunner.postprocess_sampled",
        (
            *("self", "idx_mapping", "sampled_tokens", "num_sampled", "num_rejected"),
            *("query_start_loc", "draft_tokens"),
        ),
    )
    backend_flags: VllmFields = VllmFields(
        ATTENTION,
        "AttentionBackend",
        (
            *("supported_dtypes", "supported_kv_cache_dtypes", "forward_includes_kv_cache_update"),
            "supports_kv_cache_update_bypass",
        ),
    )
    draw_draft: VllmFunction = VllmFunction(
        f"{SPECULATORS}.speculator",
        "DraftModelSpeculator.sample_draft",
        (
            *("self", "hidden_states", "sample_src_positions", "idx_mapping", "temperature"),
            *("seeds", "draft_step", "draft_logits", "spec_step_idx", "num_steps"),
        ),
    )
    noise_by_column: bool = True

    @staticmethod
    def wanted_drafts(scheduler_output: Any) -> int:
        skips = getattr(scheduler_output, "skip_drafts", False)
        return 0 if skips else scheduler_output.num_spec_tokens_to_schedule


ADAPTER = Vllm033()
