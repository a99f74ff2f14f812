"""A smaller model as the drafter: it continues each request greedily."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from nwor_specpv import DraftTree, NworConfig
from nwor_specpv.drafters import Drafter, TreeConfig
from nwor_specpv.drafters.base import check_requests, check_retracted

from .request import Part, Request
from .round import Round
from .runner import ModelRunner

_PREFILL_ROWS = 256
_FEW_ROWS = 16  # more rows are a prompt, which no graph captures


class ModelDrafter(Drafter):
    """Drafts chains with a causal language model of transformers with the target's vocabulary.

    It has its own paged cache; rejected drafts are removed by truncation.
    """

    def __init__(self, model: Any) -> None:
        on_gpu = getattr(getattr(model, "device", None), "type", "") == "cuda"
        self._runner = ModelRunner(model, NworConfig(), graphs=on_gpu)
        self.vocab_size = self._runner.vocab_size
        self._tokens: dict[Hashable, list[int]] = {}
        self._keys: dict[Hashable, int] = {}
        self._next = 0

    def begin(self, request: Hashable, prompt_ids: Sequence[int]) -> None:
        self._next += 1
        self._keys[request] = self._next
        self._tokens[request] = list(prompt_ids[:1])

    def observe(
        self, request: Hashable, tokens: Sequence[int], features: torch.Tensor | None
    ) -> None:
        self._tokens[request] += tokens

    def retract(self, request: Hashable, num_tokens: int) -> bool:
        check_retracted(num_tokens)
        if num_tokens == 0:
            return True
        tokens = self._tokens[request]
        if num_tokens >= len(tokens):  # the first token is the prompt's and was not observed
            return False
        del tokens[-num_tokens:]
        self._truncate(request, len(tokens) - 1)
        return True

    def end(self, request: Hashable) -> None:
        key = self._keys.pop(request, None)
        self._tokens.pop(request, None)
        if key is not None and key in self._runner.cache.allocator:
            self._runner.cache.allocator.free(key)

    def draft(self, requests: Sequence[Hashable], tree: TreeConfig) -> list[DraftTree]:
        check_requests(requests)
        depth = min(tree.depth, tree.rows - 1) if tree.rows else tree.depth
        self._reserve(depth)
        with self._runner.installed():
            return [DraftTree(self._chain(request, depth)) for request in requests]

    def _reserve(self, depth: int) -> None:
        """Makes room for every request; a cache that grows is emptied, and prompts run again."""
        size, limit = self._runner.page_size, self._runner.context
        needed = sum(min(len(own) + depth, limit) + size for own in self._tokens.values())
        if self._runner.cache.capacity < needed:
            self._runner.reserve(min(2 * needed, len(self._tokens) * (limit + size)))

    def _chain(self, request: Hashable, depth: int) -> list[int]:
        """The root and `depth` tokens after it."""
        tokens = self._tokens[request]
        chain = [tokens[-1]]
        limit = self._runner.context
        if len(tokens) > limit:  # beyond the context of this model
            return chain
        allocator = self._runner.cache.allocator
        key = self._keys[request]
        self._truncate(request, len(tokens) - 1)  # the root's row is always run
        cached = allocator.length(key) if key in allocator else 0
        allocator.extend(key, 0)
        rows = tokens[cached:]
        for _ in range(depth):
            while len(rows) > _PREFILL_ROWS:
                self._run(key, cached, rows[:_PREFILL_ROWS])
                cached, rows = cached + _PREFILL_ROWS, rows[_PREFILL_ROWS:]
            if cached + len(rows) > limit:
                break
            chain.append(self._run(key, cached, rows))
            cached, rows = cached + len(rows), chain[-1:]
        self._truncate(request, len(tokens))
        return chain

    def _run(self, key: int, prefix: int, rows: list[int]) -> int:
        request = Request(key, 0, [], 0, 1, 0, 0)
        part = Part(request, rows[:-1], rows[-1:], [-1], prefix)
        round_ = Round(self._runner, [part], graphs=len(rows) <= _FEW_ROWS)
        try:
            round_.run(None, 1)
            following = int(round_.tree_logits()[0, 0].argmax())
            round_.commit([[]])
        except BaseException:
            round_.abort()
            self._runner.cache.truncate(key, prefix)  # its slots may not be written
            raise
        return following

    def _truncate(self, request: Hashable, length: int) -> None:
        cache, key = self._runner.cache, self._keys[request]
        if key in cache.allocator and cache.allocator.length(key) > length:
            cache.truncate(key, length)
