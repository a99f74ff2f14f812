"""Guesses from the request's own text: what followed its last tokens where they stood before."""

from __future__ import annotations

import torch

from nwor_specpv.ops import certain_logits

from .chain import Chains
from .draft_models import Drafting
from .texts import Texts


class NgramHead:
    """Stands where a trained head does: it looks up the text and the chain. Runs in graphs."""

    def __init__(self, speculator: Drafting, chains: Chains, texts: Texts) -> None:
        self._speculator, self._chains, self._texts = speculator, chains, texts

    def go_on(self, count: int) -> torch.Tensor:
        return self._guess(count, self._chains.rows - 1)

    def take_up(
        self, chains: Chains, count: int, hidden: torch.Tensor, *, last: bool
    ) -> torch.Tensor:
        # What the pass said after its first row stands one place further.
        self._texts.append(self._rows(count), chains.starts[:count] + 1, chains.said[:count])
        return self._guess(count, chains.limit if last else chains.rows - 1)

    def tell(self, chains: Chains, count: int) -> None:
        logits = self._speculator.draft_logits
        if self._speculator.draws and logits is not None:
            drafts = chains.drafts[:count, : chains.limit]
            certain_logits(logits, self._rows(count), chains.lens[:count], drafts)

    def _guess(self, count: int, number: int) -> torch.Tensor:
        chains = self._chains
        lens = chains.prefix[:count] + chains.lens[:count] + 1  # with the latest token
        return self._texts.look_up(self._rows(count), lens, number)

    def _rows(self, count: int) -> torch.Tensor:
        """[count] int32: the texts of requests whose chains grow; nobody's row for the others."""
        requests = self._speculator.idx_mapping[:count].to(torch.int32)
        grows = self._chains.open(count) & (requests >= 0)
        return torch.where(grows, requests, self._texts.nobody)
