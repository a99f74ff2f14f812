"""The paged cache of a Generator: pages of our allocator, drafts staged by our interceptor."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers.cache_utils import Cache

from nwor_specpv import (
    ContractChecker,
    Interceptor,
    NworConfig,
    NworError,
    SlotAllocator,
    pinned_cache,
)

from .graphs import StepGraphs
from .layers.attention import Step


class PagedCache(Cache):
    """K/V of many requests of different lengths, in pages. Not thread-safe.

    A model writes through `update`, our layers through `write`, which it calls: rows of the
    current step go to their slots, drafts to staging.
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
        graphs: bool = False,
        offload: bool = False,
    ) -> None:
        """`offload`: K/V is in host memory, which the device reads and writes in place."""
        super().__init__(layers=[])
        shape = (num_layers, num_pages, page_size, num_heads, head_dim)
        # Poisoned under check: whatever reads a slot that was never written shows at once.
        fill = float("nan") if check_contract else 0.0
        make = pinned_cache if offload else torch.empty
        self.keys, self.values = (
            make(shape, dtype=dtype, device=device).fill_(fill) for _ in range(2)
        )
        self.num_layers, self.page_size, self.device = num_layers, page_size, device
        self.num_pages = num_pages
        self.allocator = SlotAllocator(num_pages, page_size)
        self.interceptor = Interceptor(config)  # whose graph_rows are those of the graphs
        self.caches = [(self.keys[layer], self.values[layer]) for layer in range(num_layers)]
        self._names = [str(layer) for layer in range(num_layers)]
        for name, pair in zip(self._names, self.caches, strict=True):
            self.interceptor.bind_layer(name, *pair)
        self.checker = ContractChecker(self.interceptor) if check_contract else None
        self.staging_rows = config.staging_rows
        self.graphs = (
            StepGraphs(device, self.caches, self.interceptor, config.staging_rows)
            if graphs
            else None
        )
        # What others keep about these pages, such as views of them: it goes when the cache does.
        self.beside: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._tables = _BlockTables(self.allocator, device)
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
        heads, dim = self.keys.shape[3:]
        expected = [1, heads, key_states.shape[2], dim]
        for name, states in (("key", key_states), ("value", value_states)):
            if list(states.shape) != expected:
                raise NworError(
                    f"model: got {name} states of {list(states.shape)} from layer {layer_idx}, "
                    f"expected {expected} by its configuration; use a model that caches K and V of "
                    "every KV head"
                )
        self.expect_attention()
        self.write(layer_idx, *(side[0].transpose(0, 1) for side in (key_states, value_states)))
        self.step.cached_kv = (key_states, value_states)
        return key_states, value_states

    def expect_attention(self) -> None:
        """Raises when a layer has written K/V and then not attended through us."""
        if self.step is not None and self.step.cached_kv is not None:
            raise NworError(
                "model: got a layer that attends by itself, expected all to go through "
                "transformers' attention interface; use a model whose layers do"
            )

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """K/V [T, H, D] of the current step's rows."""
        if self.step is None:
            raise NworError("update: got no step; this cache is filled by a Generator only")
        outcome = self.interceptor.write(self._names[layer], key, value, self.step.slots)
        if outcome.action == "bypass":
            raise NworError(f"write: the interceptor refused layer {layer}: {outcome.reason}")
        self.written += 1

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

    def truncate(self, request: Hashable, length: int) -> None:
        """Keeps the first tokens of a request."""
        self.allocator.truncate(request, length)
        self._tables.forget_from(request, length // self.page_size)

    def block_table(self, requests: list[Hashable | None]) -> torch.Tensor:
        """[len(requests), pages] int32 on the cache's device; None: a request without rows.

        Entries past a request's pages hold anything. It is good until the next call.
        """
        return self._tables.of(requests)


class _BlockTables:
    """The table of the batch that was asked for last; from step to step a few pages join it."""

    def __init__(self, allocator: SlotAllocator, device: torch.device) -> None:
        self._allocator, self._device = allocator, device
        self._requests: list[Hashable | None] = []
        self._known: dict[Hashable, int] = {}  # pages that are in the table
        self._host = self._table = torch.zeros(0, 0, dtype=torch.int32)

    def forget_from(self, request: Hashable, page: int) -> None:
        if request in self._known:
            self._known[request] = min(self._known[request], page)

    def of(self, requests: list[Hashable | None]) -> torch.Tensor:
        if requests != self._requests:
            self._requests, self._known = list(requests), {}
        fresh = []
        for row, request in enumerate(requests):
            if request is None:
                continue
            # The last page may be another one by now: a copy of one that was shared.
            first = max(0, self._known.get(request, 0) - 1)
            pages = self._allocator.pages(request, first)
            fresh.append((row, first, pages))
            self._known[request] = first + len(pages)
        longest = max((first + len(pages) for _, first, pages in fresh), default=0)
        if len(requests) != self._host.shape[0] or longest > self._host.shape[1]:
            self._grow(len(requests), longest)
            fresh = [
                (row, 0, self._allocator.pages(request))
                for row, request in enumerate(requests)
                if request is not None
            ]
        for row, first, pages in fresh:
            new, span = torch.tensor(pages, dtype=torch.int32), slice(first, first + len(pages))
            if not torch.equal(self._host[row, span], new):
                self._host[row, span] = new
                if self._table is not self._host:
                    self._table[row, span].copy_(new)
        return self._table

    def _grow(self, rows: int, pages: int) -> None:
        pages = max(16, pages + pages // 8)
        self._host = torch.zeros(rows, pages, dtype=torch.int32)
        on_host = self._device.type == "cpu"
        self._table = self._host if on_host else torch.zeros_like(self._host, device=self._device)
