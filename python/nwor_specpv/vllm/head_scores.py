"""Logits of an EAGLE head over the tokens that it knows."""

from __future__ import annotations

from typing import Any

import torch


def own_scores(speculator: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Logits [rows, own tokens] of a head with a vocabulary of its own, and for each of its tokens
    how far ahead the target's id is: `token + ahead[token]`.

    vLLM's `compute_logits` spreads these logits over the target's vocabulary, where most are
    -infinite. None: that is the only way, as the head knows all tokens or ranks share its matrix.
    """
    model = speculator.model
    ahead = getattr(model, "draft_id_to_target_id", None)
    process = getattr(model, "logits_processor", None)
    if ahead is None or process is None:
        return None
    if speculator.vllm_config.parallel_config.tensor_parallel_size > 1:
        return None
    scores = process(model.lm_head, hidden)
    if scores.shape[-1] != ahead.shape[0]:  # the target's own output matrix
        return None
    return scores, ahead
