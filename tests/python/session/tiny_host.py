"""A session store over the shipped story model, with its cache."""

from __future__ import annotations

import torch

from nwor_specpv import (
    Interceptor,
    NworConfig,
    SessionBatch,
    SessionStore,
    verify_attention,
)
from nwor_specpv.models.tiny_model import TinyModel

PAGE_SIZE = 16


class TinyHost:
    """Owns the model and the pages; `store` has the sessions."""

    def __init__(self, num_pages: int = 96, model: TinyModel | None = None, **options) -> None:
        self.model = model or TinyModel()
        shape = self.model.shape
        sizes = (num_pages, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
        # Poisoned: whatever reads a slot that was never written shows at once.
        self.keys = [torch.full(sizes, float("nan")) for _ in range(shape.num_layers)]
        self.values = [torch.full(sizes, float("nan")) for _ in range(shape.num_layers)]
        self.interceptor = Interceptor(NworConfig())
        for layer in range(shape.num_layers):
            self.interceptor.bind_layer(str(layer), self.keys[layer], self.values[layer])
        self.batches: list[list[str]] = []
        accept = options.pop("accept", None)
        self.store = SessionStore(
            self.interceptor, self.forward, accept, vocab_size=shape.vocabulary, **options
        )

    def forward(self, batch: SessionBatch) -> torch.Tensor:
        self.batches.append(batch.sessions)

        def attend(layer, query, key, value):
            self.interceptor.write(str(layer), key, value, batch.slot_mapping, epoch=batch.epoch)
            return verify_attention(
                query,
                key,
                value,
                self.keys[layer],
                self.values[layer],
                batch.block_table,
                batch.prefix_lens,
                batch.query_start,
                batch.tree_mask,
                query.shape[-1] ** -0.5,
            )

        return self.model.forward(batch.tokens, batch.positions, attend)


def page_bytes(model: TinyModel) -> int:
    shape = model.shape
    return shape.num_layers * 2 * PAGE_SIZE * shape.num_kv_heads * shape.head_dim * 4
