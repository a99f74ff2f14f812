"""From the target's logits to the probabilities that acceptance takes; the likeliest tokens."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch

from nwor_specpv.errors import NworError

from ._call import call

__all__ = ["likeliest_tokens", "target_probs"]

Number = float | int | torch.Tensor

_FLOAT, _INT = torch.finfo(torch.float32), torch.iinfo(torch.int32)


def _float(name: str, value: Number) -> float:
    """As float32 can hold it."""
    if not isinstance(value, (float, int)) and not isinstance(value, Real):
        raise NworError(f"{name}: got {value!r}, expected a number")
    try:
        number = float(value)
        fits = not _FLOAT.max < abs(number) < math.inf
    except OverflowError:
        fits = False
    if not fits:
        raise NworError(f"{name}: got {value!r}, expected a float32 number, at most {_FLOAT.max}")
    # A mass as small as it gets is the largest token's; 0 would be none.
    return _FLOAT.tiny if name == "top_p" and 0 < number < _FLOAT.tiny else number


def _integer(name: str, value: Number) -> int:
    """As int32 can hold it: more tokens than there are, are all."""
    if not isinstance(value, int) and not isinstance(value, Integral):
        raise NworError(f"{name}: got {value!r}, expected an integer, 0 or more")
    if value < _INT.min:
        raise NworError(f"{name}: got {value!r}, expected 0 or more")
    return min(int(value), _INT.max)


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
    all zeros, which acceptance refuses, and `status` (int64 [B], optional) says why. What is no
    number, or beyond float32, raises everywhere; a `top_k` beyond the vocabulary keeps all.
    """
    if logits.dim() != 3:
        raise NworError(
            f"logits: got sizes {list(logits.shape)}, expected [requests, rows, vocabulary]"
        )

    def per_request(name: str, value: Number, neutral: float) -> torch.Tensor | None:
        if isinstance(value, torch.Tensor):
            return value
        whole = name == "top_k"
        number = _integer(name, value) if whole else _float(name, value)
        if number == neutral:
            return None
        dtype = torch.int32 if whole else torch.float32
        return torch.full((logits.shape[0],), number, dtype=dtype, device=logits.device)

    return call(
        torch.ops.nwor_specpv.target_probs.default,
        logits,
        per_request("temperature", temperature, 1.0),
        per_request("top_k", top_k, 0),
        per_request("top_p", top_p, 1.0),
        per_request("min_p", min_p, 0.0),
        per_request("repetition_penalty", repetition_penalty, 1.0),
        per_request("frequency_penalty", frequency_penalty, 0.0),
        per_request("presence_penalty", presence_penalty, 0.0),
        output_counts,
        prompt_mask,
        tokens,
        parents,
        bitmask,
        status,
    )


def likeliest_tokens(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` likeliest tokens of each row of `logits` [.., V], int64 [.., count], and their
    log-probabilities, float32; the best first, and the lower id first of equal logits.

    `count` is at most 32. A logit that is no finite number counts as -infinite: its probability is
    0. A row gives the same bits in every batch.
    """
    return call(torch.ops.nwor_specpv.likeliest_tokens.default, logits, count)
