"""The distributions that a drafter drew its drafts from, as messages carry them.

Dense: float32 probabilities of the whole vocabulary. Sparse: for each draft the tokens that it
could have been, with log-probabilities. The log-probability of the drafted token alone is not
enough: after a rejection the next token is drawn from what the target has beyond the drafter, so
all of the drafter's distribution is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nwor_specpv.errors import NworError

from .rpc import messages

_TOLERANCE = 1e-3  # of a sum of probabilities, as acceptance takes it
_MOST_PROBABILITY = 1 + _TOLERANCE


def write_distributions(
    draft_probs: Any, draft_log_probs: Sequence[Mapping[int, float]] | None
) -> Any | None:
    """The message of what a caller gives; None for nothing."""
    if draft_probs is not None and draft_log_probs is not None:
        raise NworError("draft_probs, draft_log_probs: got both, expected one of them")
    if draft_probs is not None:
        return messages.DraftDistributions(probs=_bytes(draft_probs))
    if draft_log_probs is None:
        return None
    message = messages.DraftDistributions()
    for row in draft_log_probs:
        if not isinstance(row, Mapping):
            raise NworError(
                f"draft_log_probs: got {type(row).__name__}, expected a mapping of token to "
                "log-probability for each draft"
            )
        try:
            message.counts.append(len(row))
            message.tokens.extend(row.keys())
            message.log_probs.extend(row.values())
        except (TypeError, ValueError) as error:
            raise NworError(f"draft_log_probs: a value does not fit: {error}") from None
    return message


def _bytes(draft_probs: Any) -> bytes:
    try:
        probs = torch.as_tensor(draft_probs, dtype=torch.float32).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise NworError(f"draft_probs: got {type(draft_probs).__name__}: {error}") from None
    if probs.dim() != 2:
        raise NworError(
            f"draft_probs: got sizes {list(probs.shape)}, expected [drafts, vocabulary]"
        )
    return probs.contiguous().numpy().astype("<f4").tobytes()


class DraftDistributions:
    """Checked distributions of a chain's drafts. Sparse ones stay sparse until they are needed."""

    def __init__(self, message: Any, drafts: Sequence[int], vocab_size: int) -> None:
        """Raises NworError unless they are distributions that the drafts can be drawn from."""
        self._drafts, self._vocab_size = list(drafts), vocab_size
        sparse = bool(message.counts or message.tokens or message.log_probs)
        if sparse and message.probs:
            raise NworError("distributions: got dense and sparse ones, expected one kind")
        if sparse:
            self._dense = None
            self._rows = self._read_sparse(message)
            return
        wanted = len(self._drafts) * vocab_size * 4
        if len(message.probs) != wanted:
            raise NworError(
                f"distributions: got {len(message.probs)} bytes, expected {wanted}: "
                f"{len(self._drafts)} drafts x {vocab_size} tokens x 4"
            )
        self._dense = _from_bytes(message.probs).view(len(self._drafts), vocab_size)
        self._check_dense(self._dense)

    def dense(self, first: int, count: int, device: torch.device) -> torch.Tensor:
        """Probabilities [count, vocabulary] of drafts `first` and on."""
        if self._dense is not None:
            return self._dense[first : first + count].to(device)
        rows = torch.zeros(count, self._vocab_size)
        for row, (tokens, log_probs) in zip(rows, self._rows[first : first + count], strict=True):
            row[tokens] = log_probs.exp()
        return rows.to(device)

    def _read_sparse(self, message: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        counts, drafts = list(message.counts), self._drafts
        if len(counts) != len(drafts) or min(counts) < 1:
            raise NworError(
                f"distributions: got counts {counts[:8]} for {len(drafts)} drafts, expected one "
                "for each draft, 1 or more"
            )
        if not sum(counts) == len(message.tokens) == len(message.log_probs):
            raise NworError(
                f"distributions: got {len(message.tokens)} tokens and {len(message.log_probs)} "
                f"log-probabilities, expected {sum(counts)} as the counts say"
            )
        all_tokens = torch.tensor(list(message.tokens))
        all_log_probs = torch.tensor(list(message.log_probs))
        rows = list(zip(all_tokens.split(counts), all_log_probs.split(counts), strict=True))
        for row, ((tokens, log_probs), draft) in enumerate(zip(rows, drafts, strict=True), 1):
            self._check_sparse(row, tokens, log_probs, draft)
        return rows

    def _check_sparse(
        self, row: int, tokens: torch.Tensor, log_probs: torch.Tensor, draft: int
    ) -> None:
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._vocab_size:
            raise NworError(
                f"distributions: got token {low if low < 0 else high} for row {row}, expected 0 "
                f"to {self._vocab_size - 1}"
            )
        if len(tokens.unique()) != len(tokens):
            raise NworError(f"distributions: got a token twice for row {row}, expected it once")
        probs = log_probs.double().exp()
        self._check_row(row, float(probs.min()), float(probs.max()), float(probs.sum()))
        if not probs[tokens == draft].sum() > 0:
            raise _impossible(row, draft)

    def _check_dense(self, probs: torch.Tensor) -> None:
        sums = probs.double().sum(-1).tolist()
        lows, highs = probs.amin(-1).tolist(), probs.amax(-1).tolist()
        for row, draft in enumerate(self._drafts, 1):
            self._check_row(row, lows[row - 1], highs[row - 1], sums[row - 1])
            if not probs[row - 1, draft] > 0:
                raise _impossible(row, draft)

    def _check_row(self, row: int, low: float, high: float, total: float) -> None:
        if math.isnan(total) or low < 0 or high > _MOST_PROBABILITY:
            wrong = "NaN" if math.isnan(total) else low if low < 0 else high
            raise NworError(
                f"distributions: got probability {wrong} for row {row}, expected 0 to 1"
            )
        if abs(total - 1) > _TOLERANCE:
            raise NworError(
                f"distributions: got probabilities that sum to {total:.4g} for row {row}, expected "
                "1; send all tokens that the draft could have been, or no distributions"
            )


def _impossible(row: int, draft: int) -> NworError:
    return NworError(
        f"distributions: got probability 0 for token {draft} of row {row}, which was drafted; "
        "expected the distribution that it was drawn from"
    )


def _from_bytes(data: bytes) -> torch.Tensor:
    import numpy

    return torch.from_numpy(numpy.frombuffer(data, dtype="<f4").astype("f4"))
