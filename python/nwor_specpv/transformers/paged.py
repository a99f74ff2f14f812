"""The paged cache of a Generator: pages of our allocator, drafts staged by our interceptor."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from transformers.cache_utils import Cache

from nwor_specpv import ContractChecker, Interceptor, NworConfig, NworError, SlotAllocator

from .attention import Step


class PagedCache(Cache):
    """K/V of many requests of different lengths, in pages. Not thread-safe.

    A model writes through `update`, the only way in: rows of the current step go to their slots,
    drafts to staging.
    """

    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        config: NworConfig,
        *,
        check_contract: bool = False,
    ) -> None:
        super().__init__(layers=[])
        shape = (num_layers, num_pages, page_size, num_heads, head_dim)
        # Poisoned under check: whatever reads a slot that was never written shows at once.
        fill = float("nan") if check_contract else 0.0
        self.keys, self.values = (
            torch.full(shape, fill, dtype=dtype, device=device) for _ in range(2)
        )
        self.num_layers, self.page_size, self.device = num_layers, page_size, device
        self.num_pages = num_pages
        self.allocator = SlotAllocator(num_pages, page_size)
        self.interceptor = Interceptor(config)
        self.caches = [(self.keys[layer], self.values[layer]) for layer in range(num_layers)]
        self._names = [str(layer) for layer in range(num_layers)]
        for name, pair in zip(self._names, self.caches, strict=True):
            self.interceptor.bind_layer(name, *pair)
        self.checker = ContractChecker(self.interceptor) if check_contract else None
        self.step: Step | None = None
        self.written = 0

    @property
    def capacity(self) -> int:
        return self.num_pages * self.page_size

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step = self.step
        if step is None:
            raise NworError("update: got no step; this cache is filled by a Generator only")
        rows = (side[0].transpose(0, 1) for side in (key_states, value_states))
        outcome = self.interceptor.write(self._names[layer_idx], *rows, step.slots)
        if outcome.action == "bypass":
            raise NworError(f"write: the interceptor refused layer {layer_idx}: {outcome.reason}")
        self.written += 1
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # of no single request; positions are always given

    # ---- slots -----------------------------------------------------------------------------------

    def extend(self, request: Hashable, count: int) -> torch.Tensor:
        """Slots of the next tokens of a request; pages it shares are copied before it writes."""
        slots = self.allocator.extend(request, count)
        for source, target in self.allocator.take_copies():
            for side in (self.keys, self.values):
                side[:, target] = side[:, source]
        return slots

    def block_table(self, requests: list[Hashable | None]) -> torch.Tensor:
        """[len(requests), longest] int32 on the cache's device; None: a request without rows."""
        pages = [[] if r is None else self.allocator.pages(r) for r in requests]
        longest = max(1, *(len(row) for row in pages))
        table = torch.zeros(len(pages), longest, dtype=torch.int32)
        for row, own in zip(table, pages, strict=True):
            row[: len(own)] = torch.tensor(own, dtype=torch.int32)
        return table.to(self.device)
