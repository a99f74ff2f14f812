"""Which rows of draft trees are accepted, with the tokens that vLLM's own sampler draws.

Drafts are the head's likeliest tokens, so nothing has to be weighed against how they were drawn. A
token is drawn after every row as plain decoding draws it there, with noise of its seed and
position. A draft is accepted if it is the token that was drawn after its parent. What is emitted is
what plain decoding emits, token for token.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from nwor_specpv.errors import NworError
from nwor_specpv.vllm import versions


class TreeSampler(RejectionSampler):
    """In the place of vLLM's rejection sampler, for the trees of one engine."""

    def __init__(self, sampler: Any, engine: Any, speculation: Any, device: torch.device) -> None:
        super().__init__(sampler, speculation, device)
        self._engine = engine

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """`invalid_drafts` [logits]: rows whose drafts a grammar has not let through."""
        sampler, step = self.sampler, self._engine.trees.step
        if step is None:
            raise NworError("nwor_specpv: a step has drafts that no tree was opened for; report it")
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        tokens = input_batch.input_ids[input_batch.logits_indices]
        positions = input_batch.positions[input_batch.logits_indices]
        vllm = versions.adapter
        processed = vllm.processed(sampler, logits, input_batch, tokens, positions)
        drawn = vllm.draw_of_target(gumbel_sample, sampler, processed, input_batch, positions)
        tokens = tokens.long()
        if invalid_drafts is not None:
            tokens = tokens.masked_fill(invalid_drafts, -1)
        emitted, count = step.accept(tokens, drawn, staged=self._engine.steps.stages)
        log_probs = None
        if sampler.sampling_states.max_num_logprobs(input_batch.idx_mapping_np) != NO_LOGPROBS:
            told = processed if sampler.logprobs_mode.startswith("processed_") else logits
            walked = told[step.logit_order(told.shape[0])]
            log_probs = vllm.log_probs(self, input_batch, emitted, count, walked)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            count,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=emitted,
            logprobs_tensors=log_probs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
