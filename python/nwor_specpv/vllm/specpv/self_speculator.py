"""Mode `lossless` on model runner V2 without a head: the target drafts for itself.

    --speculative-config '{"method": "ngram_gpu", "num_speculative_tokens": 16}'
    --scheduler-cls nwor_specpv.vllm.specpv.scheduler.LongContextScheduler

Guesses come from the request's own text, by a lookup on the device. Partial passes of the target
confirm them, and the target's own next token joins the chain with each pass, so a pass is never in
vain. Where passes do not pay, lookups draft alone, as vLLM's `ngram_gpu` does. vLLM's next step
verifies all drafts with full attention.

vLLM fixes the number of drafts before they are made, so a lookup without a match drafts, too: the
latest token again.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from nwor_specpv.errors import logger
from nwor_specpv.ops import certain_logits
from nwor_specpv.vllm import versions

from .chain import Chains
from .lengths import match_lengths
from .ngram_head import NgramHead
from .proposals import PassProposals
from .target import TargetModel, own_layers
from .texts import Texts


class SelfSpeculator(PassProposals, DraftModelSpeculator):
    """A speculator whose only model is the target. Thread-safety: none."""

    alone = "lookups draft alone"
    draws_guesses = False
    supports_mm_inputs = False

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._begin_life(vllm_config)
        lengths = match_lengths(self.speculative_config)
        self._texts = Texts(self.max_num_reqs, self.max_model_len, self.limit, lengths, device)
        self._manager: Any = None  # of CUDA graphs
        logger.info("nwor_specpv: texts for lookups take %.1f MB", self._texts.bytes / 1e6)

    def make_head(self, chains: Chains) -> NgramHead:
        return NgramHead(self, chains, self._texts)

    def graph_pool(self) -> Any:
        assert self._manager is not None
        return self._manager.pool

    @property
    def idles(self) -> bool:
        """Whether plain steps ask nothing of it: texts are copied when they are looked at."""
        return self._offered and self._plain_steps

    # ---- what vLLM calls ------------------------------------------------------------------------

    def load_draft_model(self, target_model: Any, target_attn_layer_names: set[str]) -> Any:
        return target_model

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        names = own_layers(self._engine.layers)
        self._target = TargetModel(self.vllm_config, target_model, names)

    def set_attn(
        self,
        model_state: Any,
        kv_cache_config: Any,
        block_tables: Any,
        target_input_buffers: Any,
        target_attn_groups: Any,
    ) -> None:
        """No layer is ours alone, so there is no backend to make."""
        self.model_state = model_state
        self.kv_cache_config = kv_cache_config
        self.block_tables = block_tables

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """It tells the sizes of batches: there are graphs of passes for the same."""
        managers = versions.adapter.speculator_graphs()
        self._manager = managers(self.vllm_config, self.device, cudagraph_mode, self.limit + 1)

    def capture(self) -> None:
        assert self._manager is not None
        self._capture_passes(self._manager._capture_descs.get(CUDAGraphMode.FULL, ()))

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        next_prefill_tokens: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        **others: Any,
    ) -> torch.Tensor:
        count = input_batch.num_reqs
        if others.get("dummy_run") or others.get("is_profile"):
            return self.draft_tokens[:count]
        wanted, passes = self._decide()
        if wanted:
            self._choose_sampling(input_batch, passes)
            prefix = self._update_texts(input_batch, num_rejected)
        if wanted and not passes:
            self._look_up(input_batch, prefix)
        elif wanted:
            self._copy_request_inputs(count, input_batch.idx_mapping, temperature, seeds)
            self.idx_mapping[count:].fill_(-1)  # who only fills the batch has no text
        self._try_passes(input_batch, passes, num_sampled, num_rejected, last_sampled)
        return self.draft_tokens[:count]

    # ---- texts and lookups ----------------------------------------------------------------------

    def _update_texts(self, input_batch: Any, num_rejected: torch.Tensor) -> torch.Tensor:
        """Returns where the latest token of each request is, [B]."""
        count = input_batch.num_reqs
        prefix = input_batch.seq_lens[:count] - num_rejected[:count]
        self._texts.update(
            versions.adapter.texts_of(self._engine.runner),
            input_batch.req_ids,
            input_batch.idx_mapping_np,
            input_batch.seq_lens_cpu_upper_bound[:count].numpy(),
            input_batch.prefill_len_np,
            input_batch.idx_mapping,
            prefix,
        )
        return prefix

    def _look_up(self, input_batch: Any, prefix: torch.Tensor) -> None:
        """Drafts by lookups alone."""
        count, requests = input_batch.num_reqs, input_batch.idx_mapping.to(torch.int32)
        drafts = self._texts.look_up(requests, prefix + 1, self.limit)
        self.draft_tokens[:count] = drafts
        if self.draws and self.draft_logits is not None:
            certain_logits(self.draft_logits, requests, torch.zeros_like(requests), drafts)
