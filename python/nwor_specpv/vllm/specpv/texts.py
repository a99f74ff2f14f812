"""Texts of requests in device memory, for lookups.

vLLM keeps texts in host memory that the device can read. Lookups read a whole text in every pass,
so they have a copy on the device. A text is copied when its request comes, and then by the few
tokens of each step. Drafts of a proposal lie beyond the text's end until other tokens overwrite
them. A text that is not up to date costs guesses, never output.

Memory: 4 bytes a token, for `max_num_seqs` texts of `max_model_len` tokens. Thread-safety: none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nwor_specpv.ops import ngram_lookup


class Texts:
    """Texts of up to `max_requests` requests by vLLM's index of each."""

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        limit: int,
        lengths: tuple[int, int],
        device: torch.device,
    ) -> None:
        """`limit`: drafts of a request. `lengths`: tokens of a match, at least and at most."""
        self._limit, (self._shortest, self._longest) = limit, lengths
        # The last row is nobody's: what must go nowhere is written there.
        self.nobody = max_requests
        size = (max_requests + 1, max_tokens + 2 * (limit + 1))
        self.tokens = torch.zeros(size, dtype=torch.int32, device=device)
        # Tokens before the latest one that a step copies: steps in flight are known at most.
        self._window = torch.arange(4 * (limit + 1), device=device)
        # By index: whose text it is, and tokens that were copied at least.
        self._names: list[str] = [""] * max_requests
        self._copied = np.zeros(max_requests, dtype=np.int64)

    @property
    def bytes(self) -> int:
        return self.tokens.nbytes

    def update(
        self,
        source: torch.Tensor,
        names: Sequence[str],
        indices: np.ndarray,
        ends: np.ndarray,
        prompts: np.ndarray,
        idx_mapping: torch.Tensor,
        prefix: torch.Tensor,
    ) -> None:
        """Copies what the requests of a step have got since they were copied last.

        `source` [requests, tokens] int32: vLLM's texts. `ends`, `prompts` [B]: each request's
        tokens at most, without the latest one, and those of its prompt. `idx_mapping` [B], `prefix`
        [B]: the same on the device, exactly: the latest token of request b is at `prefix[b]`.
        """
        most = source.shape[1]
        for name, index in zip(names, indices.tolist(), strict=True):
            if self._names[index] != name:
                self._names[index], self._copied[index] = name, 0
        begins, bounds = self._copied[indices], np.minimum(np.maximum(ends + 1, prompts), most)
        for b in np.flatnonzero(bounds - begins > self._window.shape[0]):
            piece = indices[b], slice(begins[b], bounds[b])
            self.tokens[piece].copy_(source[piece], non_blocking=True)
        # Two steps may be in flight, and all their drafts may be rejected.
        sure = np.maximum(ends + 1 - 2 * self._limit, np.minimum(prompts, bounds))
        self._copied[indices] = np.maximum(sure, 0)
        places = (prefix[:, None] - self._window).clamp(min=0, max=most - 1)
        rows = idx_mapping.long()[:, None]
        self.tokens[rows, places] = source[rows, places]

    def look_up(self, rows: torch.Tensor, lens: torch.Tensor, count: int) -> torch.Tensor:
        """[B, count] int64: what may follow the first `lens` [B] tokens of these rows [B]."""
        guesses, _ = ngram_lookup(
            self.tokens,
            rows,
            lens,
            min_tokens=self._shortest,
            max_tokens=self._longest,
            count=count,
        )
        return guesses

    def append(self, rows: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Writes drafts [B, n] from `places` [B] on; rows [B] that are nobody's go nowhere."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        at = (places.long()[:, None] + steps).clamp(min=0, max=self.tokens.shape[1] - 1)
        self.tokens[rows.long()[:, None], at] = tokens.to(torch.int32)
