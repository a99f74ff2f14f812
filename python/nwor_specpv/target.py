"""From the target's logits to the probabilities that acceptance takes."""

from __future__ import annotations

import torch

from ._call import call
from .errors import NworError

__all__ = ["target_probs"]

Number = float | int | torch.Tensor


def target_probs(
    logits: torch.Tensor,
    *,
    temperature: Number = 1.0,
    top_k: Number = 0,
    top_p: Number = 1.0,
    min_p: Number = 0.0,
    repetition_penalty: Number = 1.0,
    frequency_penalty: Number = 0.0,
    presence_penalty: Number = 0.0,
    output_counts: torch.Tensor | None = None,
    prompt_mask: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    parents: torch.Tensor | None = None,
    bitmask: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> torch.Tensor:
    """Probabilities float32 [B, R, V] from `logits` [B, R, V], in this order:

    1. penalties: repetition over prompt (`prompt_mask` [B, V] bool) and output; frequency and
       presence over output (`output_counts` [B, V] int32, the root included). With `tokens` and
       `parents` [B, R] the drafts above a row count as output there: what plain decoding would see;
    2. `bitmask` [B, R, ceil(V / 32)] int32: a token whose bit is not set is impossible;
    3. temperature; 0 puts all mass on the largest logit (the lowest id of equals) and ends;
    4. top-k: the k largest and what equals the k-th; 0 keeps all;
    5. top-p: the fewest largest whose mass is at least p, and what equals the last of them;
    6. min-p: what is at least `min_p` times as probable as the most probable;
    7. normalised to one.

    Numbers are one for all or a tensor [B]. On the CPU wrong numbers raise; on CUDA such a row is
    all zeros, which acceptance refuses, and `status` (int64 [B], optional) says why.
    """
    if logits.dim() != 3:
        raise NworError(
            f"logits: got sizes {list(logits.shape)}, expected [requests, rows, vocabulary]"
        )

    def per_request(value: Number, neutral: float, dtype: torch.dtype) -> torch.Tensor | None:
        if isinstance(value, torch.Tensor):
            return value
        if value == neutral:
            return None
        return torch.full((logits.shape[0],), value, dtype=dtype, device=logits.device)

    return call(
        torch.ops.nwor_specpv.target_probs.default,
        logits,
        per_request(temperature, 1.0, torch.float32),
        per_request(top_k, 0, torch.int32),
        per_request(top_p, 1.0, torch.float32),
        per_request(min_p, 0.0, torch.float32),
        per_request(repetition_penalty, 1.0, torch.float32),
        per_request(frequency_penalty, 0.0, torch.float32),
        per_request(presence_penalty, 0.0, torch.float32),
        output_counts,
        prompt_mask,
        tokens,
        parents,
        bitmask,
        status,
    )
