"""How drafts of requests at temperatures above 0 are drawn, and who owns their logits.

vLLM's sampler accepts a drawn draft far more often than the likeliest token, if it is told the
logits that the draft was drawn from. They take `max_num_seqs` x drafts x vocabulary x 4 bytes, so
`specpv_draft_sampling` decides: `auto` takes the memory where it is a small share of what is free.
Drafts are drawn from what the request's temperature, top-k, top-p and min-p leave, as its tokens
are. Any distribution of drafts gives the same output distribution; this one is accepted most.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from nwor_specpv.errors import NworError, logger
from nwor_specpv.ops import target_probs
from nwor_specpv.vllm import versions

# Of the memory that is free when the speculator is made: what draft logits take by themselves.
_LARGEST_SHARE = 0.05
# The logit of a token that cannot be drawn. Finite: sums of such rows stay free of NaN.
_NO_CHANCE = -1e30


class Drawing(Protocol):
    """What a drawing speculator has, all [requests] by vLLM's index but for the last."""

    temperature: torch.Tensor
    top_k: torch.Tensor  # int32; 0 or the vocabulary: all tokens
    top_p: torch.Tensor
    min_p: torch.Tensor
    draft_seeds: torch.Tensor
    use_fp64_gumbel: bool
    limit: int  # drafts of a request
    draft_logits: torch.Tensor | None  # [requests, limit, vocabulary]


def draw(
    spec: Drawing,
    logits: torch.Tensor,
    requests: torch.Tensor,
    positions: torch.Tensor,
    columns: torch.Tensor | None,
) -> torch.Tensor:
    """Tokens as requests [B] ask for, from logits [B * rows, vocabulary] in their order.

    Of those that are drafts of the full step, its sampler has to know the logits: `columns`
    [B * rows] tells which, those not below the limit are none. Positions [B * rows] are the rows',
    as the full step will have them.
    """
    count, own = requests.shape[0], requests.clamp(min=0).long()
    probs = target_probs(
        logits.view(count, -1, logits.shape[-1]),
        temperature=spec.temperature[own],
        top_k=spec.top_k[own],
        top_p=spec.top_p[own],
        min_p=spec.min_p[own],
    )
    owners = requests[:, None].expand(-1, probs.shape[1]).reshape(-1)
    if columns is not None:
        owners = torch.where(columns < spec.limit, owners, -1)
        columns = columns.clamp(max=spec.limit - 1)
    return versions.adapter.draw(
        gumbel_sample,
        probs.flatten(0, 1).log_().clamp_(min=_NO_CHANCE),
        owners,
        spec.temperature,
        spec.draft_seeds,
        positions,
        use_fp64=spec.use_fp64_gumbel,
        kept=spec.draft_logits if columns is not None else None,
        columns=columns,
    )


def own_logits(
    setting: str,
    held: torch.Tensor | None,
    shape: tuple[int, int, int],
    problem: str,
    device: torch.device,
) -> torch.Tensor | None:
    """Draft logits [requests, drafts, vocabulary], None: drafts are greedy.

    `held`: vLLM's, which a user asked for by `draft_sample_method`. They may be of the head's
    dtype, in which ours would be rounded. `problem`: why drafts cannot be drawn here; empty: they
    can.
    """
    if setting == "greedy":
        return None
    if held is not None and held.dtype == torch.float32:
        return held
    needed, free = 4 * shape[0] * shape[1] * shape[2], free_bytes(device)
    if not problem and setting == "auto" and needed > _LARGEST_SHARE * free:
        problem = (
            f"their logits would take {needed / 1e9:.1f} GB, more than {_LARGEST_SHARE:.0%} of the "
            f"free memory of {free / 1e9:.1f} GB"
        )
    if problem and setting == "sampled":
        raise NworError(f"nwor_specpv, specpv_draft_sampling 'sampled': {problem}; use 'auto'")
    if problem:
        logger.warning(
            "nwor_specpv: drafts are greedy, so requests at temperatures above 0 accept fewer of "
            "them: %s; use a smaller --max-num-seqs, or set specpv_draft_sampling",
            problem,
        )
        return None
    return torch.zeros(shape, dtype=torch.float32, device=device)


def free_bytes(device: torch.device) -> int:
    """Memory of the device that is free; on a CPU, of the machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
