"""Drafts without a model: the tokens that followed earlier occurrences of the last tokens.

The index is in C++ (csrc/drafters). Adding a token takes constant time, a draft looks at a bounded
number of places, and matches that disagree become branches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from nwor_specpv import _C
from nwor_specpv.errors import NworError

from .base import Drafter, TreeConfig, check_requests, check_retracted

if TYPE_CHECKING:
    import torch

    from nwor_specpv._C import DraftTree

# Rows of a tree when neither host nor caller sets them.
_DEFAULT_ROWS = 16


class NgramDrafter(Drafter):
    """Keeps one index for each request, over its prompt and its answer."""

    def __init__(self, min_tokens: int = 2, max_tokens: int = 6, max_matches: int = 16) -> None:
        """A match has at least `min_tokens` in common; beyond `max_tokens` all count the same."""
        self._options = (min_tokens, max_tokens, max_matches)
        _C.NgramIndex(*self._options)  # raises on wrong options
        self._texts: dict[Hashable, _C.NgramIndex] = {}
        self._prompts: dict[Hashable, list[int]] = {}

    def begin(self, request: Hashable, prompt_ids: Sequence[int]) -> None:
        if request in self._texts:
            raise NworError(f"request: got {request!r}, which has already begun")
        text = _C.NgramIndex(*self._options)
        text.append(list(prompt_ids))
        self._texts[request] = text
        self._prompts[request] = list(prompt_ids)

    def observe(
        self, request: Hashable, tokens: Sequence[int], features: torch.Tensor | None
    ) -> None:
        del features
        text, tokens = self._text(request), list(tokens)
        if not tokens:
            return
        prompt = self._prompts.get(request)
        text.append(tokens if prompt is None else _after_prompt(prompt, tokens))
        self._prompts.pop(request, None)  # only now: append may raise

    def retract(self, request: Hashable, num_tokens: int) -> bool:
        text = self._text(request)
        check_retracted(num_tokens)
        if num_tokens > len(text):
            return False
        text.truncate(len(text) - num_tokens)
        return True

    def draft(self, requests: Sequence[Hashable], tree: TreeConfig) -> list[DraftTree]:
        check_requests(requests)
        rows = tree.rows or _DEFAULT_ROWS
        return [self._text(request).draft(rows, tree.depth, tree.top_k) for request in requests]

    def end(self, request: Hashable) -> None:
        self._texts.pop(request, None)
        self._prompts.pop(request, None)

    def _text(self, request: Hashable) -> _C.NgramIndex:
        text = self._texts.get(request)
        if text is None:
            raise NworError(f"request: got {request!r}, which has not begun")
        return text


def _after_prompt(prompt: list[int], tokens: list[int]) -> list[int]:
    """Drops the prompt's own tokens from the first tokens observed, which are in the index."""
    if tokens[: len(prompt) - 1] == prompt[1:]:
        return tokens[len(prompt) - 1 :]
    # Rows that were cached before were not run; the last row gave the first new token.
    known = len(tokens) - 1
    if known and tokens[:-1] != prompt[-known:]:
        raise NworError(
            f"tokens: got {tokens[:4]}.. after the prompt, expected the prompt's own tokens"
        )
    return tokens[-1:]
