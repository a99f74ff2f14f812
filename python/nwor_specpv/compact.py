"""Compact storage: the tokens of partial views copied into contiguous memory.

Needed when the full cache lives in host memory (`specpv_offload`). A refresh copies a view's tokens
once; after that the commit that writes accepted rows to the full cache appends them to the view.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from . import _C
from .errors import NworError, logger
from .ops.attention import CompactView
from .ops.kv import CommitTail
from .ops.retrieval import gather_view
from .partial import Batch, PartialStore, StoredCache

__all__ = ["CompactViews", "pinned_cache"]


def pinned_cache(
    sizes: Sequence[int], *, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Memory for a paged cache that stays in the host's memory (`specpv_offload`).

    The tensor is one of `device`: every op of this package reads and writes it in place, over the
    bus. Full steps are therefore slow and partial steps, which read compact views, are not. On the
    CPU it is ordinary memory.
    """
    try:
        where = torch.device(device)
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        return _C.pinned_cache(list(sizes), dtype, where)
    except RuntimeError as error:
        raise NworError(f"pinned_cache: {error}") from None


class CompactViews:
    """A `CompactView` per layer for the requests of a `PartialStore`'s batch.

        store.begin(batch)
        store.build_views(block_table)
        compact.update(batch)                              # gathers what is new
        verify_attention(..., view=compact.view(layer))
        commit(..., tail=compact.tail(root_slots))         # accepted rows go behind the views

    What a view holds is device data that the commit moves on, so nothing is read back. After a
    commit that was refused, or one without `tail`, the next `update` copies those tokens.
    Caches may be in pinned host memory. When a copy fails, its requests see their whole prefix in
    this step and run a full step next (`offload_failure`, counted; the reason is logged).
    A request should keep its place in the batch: its view is copied again when it moves.
    """

    def __init__(
        self,
        store: PartialStore,
        key_caches: Sequence[torch.Tensor],
        value_caches: Sequence[torch.Tensor],
    ) -> None:
        if len(key_caches) != store.num_layers or len(value_caches) != store.num_layers:
            raise NworError(
                f"key_caches, value_caches: got {len(key_caches)} and {len(value_caches)} layers, "
                f"expected {store.num_layers} as the store"
            )
        self._store = store
        self._caches = key_caches, value_caches
        _, _, heads, dim = key_caches[0].shape
        self._device = store.num_blocks.device
        batch = store.num_blocks.shape[0]
        self._most = store.blocks(0).shape[-1] * store.budget.block_size  # tokens of a view
        # The step's own rows join the tail before the next view is made.
        shape = (2, store.num_layers, batch, heads, self._most + store.budget.max_rows, dim)
        self._kv = torch.empty(shape, dtype=key_caches[0].dtype, device=self._device)
        # Lengths of this step's views, and whether what a place holds is still of use.
        self._step = torch.full((2, batch), -1, dtype=torch.int32, device=self._device)
        self._held = torch.zeros(batch, dtype=torch.int32, device=self._device)
        # What each place of the batch holds: whose tokens, selected when. A request that is gone
        # must not be kept by its view.
        self._owners: list[tuple[weakref.ref[StoredCache], int] | None] = [None] * batch
        self._reported: set[str] = set()
        self._gather()  # nothing yet, but caches that do not fit are refused

    @property
    def bytes(self) -> int:
        """Memory of the copies."""
        return self._kv.nbytes

    def view(self, layer: int) -> CompactView:
        """The view of a layer; the same tensors in every step."""
        keys, values = self._kv[:, layer, :, :, : self._most]
        return CompactView(keys, values, self._step[0])

    def tail(self, root_slots: torch.Tensor) -> CommitTail:
        """For this step's commit. `root_slots` [batch] int64: the cache slot of each row 0."""
        return CommitTail(self._kv[0], self._kv[1], self._step[0], root_slots, self._held)

    def update(self, batch: Batch) -> None:
        """Copies what the views of this step's partial requests do not hold yet."""
        lens, keep = [-1] * len(self._owners), [1] * len(self._owners)
        for place, entry in enumerate(batch):
            if entry is None or entry[1].kind != "partial":
                continue
            cache, decision = entry
            owner = self._owners[place]
            if owner is None or owner[0]() is not cache or owner[1] != cache.anchor_len:
                keep[place] = 0
                self._owners[place] = weakref.ref(cache), cache.anchor_len
            lens[place] = decision.view_tokens
        self._tell(lens, keep)
        try:
            self._gather()
        except (RuntimeError, ValueError) as error:
            self._report(error)
            self._tell([-1] * len(lens), [0] * len(lens))
            for place, entry in enumerate(batch):
                if lens[place] >= 0:
                    self._owners[place] = None
                    entry[0].require_full("offload_failure")

    def _tell(self, lens: list[int], keep: list[int]) -> None:
        pinned = self._device.type == "cuda"
        told = torch.tensor([lens, keep], dtype=torch.int32, pin_memory=pinned)
        self._step.copy_(told, non_blocking=True)
        self._held.mul_(self._step[1])
        # A view is as long as the store's lists: where the host believes another length, or there
        # is no view, what lies behind them belongs to nobody, or to somebody else.
        lens, listed = self._step[0], self._store.num_blocks >= 0
        lens.copy_(torch.where((lens >= 0) & listed, self._store.view_lens, -1))

    def _report(self, error: Exception) -> None:
        """Each kind of failure once: a copy that fails now will do so again."""
        kind = f"{type(error).__name__}: {str(error).partition(':')[0]}"
        if kind in self._reported:
            return
        self._reported.add(kind)
        logger.warning(
            "nwor_specpv: could not copy views; their requests see the whole prefix "
            "(offload_failure): %s",
            error,
        )

    def _gather(self) -> None:
        gather_view(
            *self._caches,
            self._store.all_blocks,
            self._step[0],
            self._held,
            self._kv[0],
            self._kv[1],
            block_size=self._store.budget.block_size,
        )
