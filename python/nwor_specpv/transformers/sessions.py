"""A session store over a model of transformers, for the target worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nwor_specpv import NworConfig, NworError, SessionBatch, SessionStore

from .layers.attention import Step
from .runner import ModelRunner


class SessionTarget:
    """Owns the cache of a model's sessions. Use the sessions through `store`, from any thread."""

    def __init__(
        self,
        model: Any,
        *,
        cache_tokens: int,
        nwor: NworConfig | None = None,
        ttl_seconds: float = 0.0,
        max_sessions: int = 0,
        max_batch: int = 64,
        accept: Callable[..., Any] | None = None,
    ) -> None:
        """`cache_tokens`: of all sessions together. The other options are SessionStore's.

        `accept` gets the logits of the rows `tree_rows.unique()`. None: a draft is accepted if and
        only if it is the model's first choice after its parent.
        """
        self._runner = ModelRunner(model, nwor or NworConfig(), cache_tokens=cache_tokens)
        cache = self._runner.cache
        self.cache_tokens = cache.capacity
        self.cache_bytes = cache.capacity * self._runner.token_bytes
        self.vocab_size = self._runner.vocab_size
        self.max_length = min(self._runner.context, cache.capacity)  # of one sequence
        self._greedy = accept is None
        self.store = SessionStore(
            cache.interceptor,
            self._forward,
            accept,
            ttl_seconds=ttl_seconds,
            vocab_size=self.vocab_size,
            max_length=self.max_length,
            max_sessions=max_sessions,
            max_batch=max_batch,
        )

    def _forward(self, batch: SessionBatch) -> torch.Tensor:
        """Runs the model; returns the logits of the trees' rows. Without `accept`: ids of all rows,
        the first choice after each row of a tree, 0 after other rows.
        """
        rows = batch.tree_rows.unique()
        step = Step(
            tokens=batch.tokens,
            positions=batch.positions,
            slots=batch.slot_mapping,
            block_table=batch.block_table,
            prefix_lens=batch.prefix_lens,
            query_start=batch.query_start,
            tree_mask=batch.tree_mask,
            max_rows=int(batch.query_start.diff().max()),
            logit_rows=None if len(rows) == len(batch.tokens) else rows,
        )
        try:
            with self._runner.installed():
                logits, _ = self._runner.run(step)
                if not self._greedy:
                    return logits
                ids = torch.zeros_like(batch.tokens)
                ids[rows] = logits.argmax(-1)
        except NworError as error:
            # To a client an NworError means wrong arguments, and these were right.
            raise RuntimeError(f"the model failed: {error}") from error
        return ids
