"""Mode `lossless` on model runner V2: an EAGLE head and partial passes of the target in turns.

    --speculative-config '{"method": "eagle3", "model": HEAD, "num_speculative_tokens": 16}'
    --scheduler-cls nwor_specpv.vllm.specpv.scheduler.LongContextScheduler

vLLM's own speculator drafts `specpv_draft_lookup` tokens with the head. Then the target
confirms them over its views, the head goes on from there, and so on, for as many passes as pay; the
head's last guesses follow the chain unconfirmed, up to `num_speculative_tokens` drafts in all.
vLLM's next step verifies them with full attention. Nothing of it is read on the host, so
asynchronous scheduling stays on. Where passes do not pay, the head drafts alone, as in vLLM.

It stands in the place of one name, `init_speculator`: see `hooks/speculators.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from nwor_specpv.vllm import versions
from nwor_specpv.vllm.hooks.graph_lengths import offer_larger_graphs

from .chain import Chains
from .draft_models import EagleHead
from .proposals import PassProposals
from .target import TargetModel, own_layers


class PartialViewSpeculator(PassProposals, EagleSpeculator):
    """vLLM's EAGLE speculator, which drafts further with the target's help. Thread-safety: none."""

    alone = "the head drafts alone"
    draws_guesses = True

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self._begin_life(vllm_config)

    def make_head(self, chains: Chains) -> EagleHead:
        return EagleHead(self, chains)

    def graph_pool(self) -> Any:
        assert self.prefill_cudagraph_manager is not None
        return self.prefill_cudagraph_manager.pool

    # ---- what vLLM calls ------------------------------------------------------------------------

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        names = own_layers(self._engine.layers, besides=self.draft_attn_layer_names)
        self._target = TargetModel(self.vllm_config, target_model, names)

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        offer_larger_graphs(self.prefill_cudagraph_manager)

    def capture(self) -> None:
        with versions.adapter.offered(self.vllm_config, self.lengths.drafts):
            super().capture()  # the head's drafts may be a graph for each number of them
        manager = self.prefill_cudagraph_manager
        if manager is not None:
            self._capture_passes(manager.graphs)

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
        passes, wanted = 0, self.limit
        others.pop("num_speculative_tokens", None)  # `_steps` says how many the head drafts
        real = not others.get("dummy_run") and not others.get("is_profile")
        if real:
            wanted, passes = self._decide()
            self._choose_sampling(input_batch, passes)
        # Without drafts, too: the head's own K/V must not have gaps.
        with self._steps(1 if passes else max(1, wanted)):
            super().propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                **others,
            )
        self._try_passes(input_batch, passes, num_sampled, num_rejected, last_sampled)
        return self.draft_tokens[: input_batch.num_reqs]

    @contextlib.contextmanager
    def _steps(self, number: int) -> Iterator[None]:
        """The head drafts so many tokens."""
        self.num_speculative_steps = number
        try:
            yield
        finally:
            self.num_speculative_steps = self.limit
