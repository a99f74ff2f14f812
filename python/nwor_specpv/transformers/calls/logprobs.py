"""Log-probabilities of the tokens that were chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nwor_specpv.transformers.request import Part, Request
from nwor_specpv.transformers.round import Round


class LogProbabilities:
    """Of the model's own logits, before penalties, processors and temperature."""

    def __init__(self) -> None:
        self._logits: torch.Tensor | None = None  # of the current round's rows

    def keep(self, round_: Round) -> None:
        """Must be called before the round's logits are changed."""
        self._logits = round_.logits

    def add(
        self,
        request: Request,
        round_: Round,
        index: int,
        rows: Sequence[int],
        tokens: Sequence[int],
    ) -> None:
        """Of new tokens, each chosen after a row of the part's tree; rows before the root are < 0.

        They replace those of tokens that are taken back at the same time.
        """
        root = round_.logit_spans()[index][1]
        count = len(request.tokens) - request.prompt_len
        if rows[0] < 0:
            count = len(request.logprobs)
        request.logprobs[count:] = self._of([root + row for row in rows[: len(tokens)]], tokens)

    def confirm(self, part: Part, round_: Round, index: int, confirmed: int) -> None:
        """Replaces those of provisional tokens by what full attention gives."""
        if not part.fed:
            return
        request, first = part.request, round_.logit_spans()[index][0]
        begin = part.prefix_len + 1
        tokens = request.tokens[begin : begin + confirmed]
        told = self._of([first + row for row in range(confirmed)], tokens)
        request.logprobs[begin - request.prompt_len :] = told

    def _of(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        if not tokens:
            return []
        logits = self._logits[list(rows)].float()
        chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        return (chosen - logits.logsumexp(1)).tolist()
