"""Compact storage: the tokens of partial views copied into contiguous memory.

Needed when the full cache lives in host memory (`specpv_offload`) or in another dtype. A refresh
copies a view's tokens once; after that only what was committed since is copied behind them.
"""

from __future__ import annotations

import torch

from .attention import CompactView
from .errors import NworError
from .partial import Batch, PartialStore

__all__ = ["CompactViews"]


class CompactViews:
    """A `CompactView` per layer for the requests of a `PartialStore`'s batch.

        store.begin(batch)
        store.build_views(block_table)
        compact.update(batch)                              # gathers what is new
        verify_attention(..., view=compact.view(layer))

    Caches may be in host memory (pinned, for copies that do not wait) while the views are on
    `device`. A copy that fails makes its request see its whole prefix in this step and asks for a
    full one next (`offload_failure`, counted).
    """

    def __init__(
        self,
        store: PartialStore,
        key_caches: list[torch.Tensor],
        value_caches: list[torch.Tensor],
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        k_scales: list[torch.Tensor] | None = None,
        v_scales: list[torch.Tensor] | None = None,
    ) -> None:
        if len(key_caches) != store.num_layers or len(value_caches) != store.num_layers:
            raise NworError(
                f"key_caches, value_caches: got {len(key_caches)} and {len(value_caches)} layers, "
                f"expected {store.num_layers} as the store"
            )
        self._store = store
        self._caches = key_caches, value_caches
        self._scales = k_scales, v_scales
        first = key_caches[0]
        _, _, heads, dim = first.shape
        self._device = torch.device(device) if device is not None else first.device
        size = store.budget.block_size
        blocks = store.blocks(0).shape[-1]
        batch = store.num_blocks.shape[0]
        shape = (2, store.num_layers, batch, heads, blocks * size, dim)
        default = torch.bfloat16 if first.dtype == torch.float8_e4m3fn else first.dtype
        self._kv = torch.empty(shape, dtype=dtype or default, device=self._device)
        self._lens = torch.full((batch,), -1, dtype=torch.int32, device=self._device)
        # What each place of the batch holds: whose tokens, selected when, how many.
        self._held: list[tuple[object, int, int] | None] = [None] * batch
        self.copied_tokens = 0

    def view(self, layer: int) -> CompactView:
        """The view of a layer; the same tensors in every step."""
        return CompactView(self._kv[0, layer], self._kv[1, layer], self._lens)

    def update(self, batch: Batch) -> None:
        """Copies what the views of this step's partial requests have not copied yet."""
        lens = [-1] * len(self._held)
        for place, entry in enumerate(batch):
            if entry is None or entry[1].kind != "partial":
                continue
            cache, decision = entry
            length = decision.view_tokens
            held = self._held[place]
            same = held is not None and held[0] is cache and held[1] == cache.anchor_len
            begin = held[2] if same else 0
            try:
                if length > begin:
                    self._copy(place, begin, length)
            except (RuntimeError, ValueError, IndexError):
                self._held[place] = None
                cache.require_full("offload_failure")
                continue
            self._held[place] = (cache, cache.anchor_len, length)
            lens[place] = length
        self._lens.copy_(torch.tensor(lens, dtype=torch.int32))

    def _copy(self, place: int, begin: int, end: int) -> None:
        """Tokens begin to end - 1 of one place's view, in all layers."""
        size = self._store.budget.block_size
        first, last = begin // size, -(-end // size)
        for layer in range(self._store.num_layers):
            blocks = self._store.blocks(layer)[place, :, first:last]
            for side in (0, 1):
                tokens = self._gather(layer, side, blocks)
                to = self._kv[side, layer, place, :, first * size : last * size]
                to.copy_(tokens, non_blocking=True)
        self.copied_tokens += end - begin

    def _gather(self, layer: int, side: int, blocks: torch.Tensor) -> torch.Tensor:
        """[Hkv, tokens, D] of the blocks that each head sees, read where they lie."""
        cache = self._caches[side][layer]
        size = self._store.budget.block_size
        parts = cache.shape[1] // size
        ids = blocks.to(cache.device, torch.long)
        offsets = torch.arange(size, device=cache.device)
        pages = (ids // parts)[..., None]
        slots = (ids % parts)[..., None] * size + offsets
        heads = torch.arange(len(ids), device=cache.device)[:, None, None]
        tokens = cache[pages, slots, heads].flatten(1, 2).to(self._kv.dtype)
        scales = self._scales[side]
        if scales is not None:
            tokens = tokens * scales[layer].to(cache.device).reshape(-1, 1, 1).to(tokens.dtype)
        if cache.device.type == "cpu" and self._device.type == "cuda":
            tokens = tokens.pin_memory()
        return tokens
