"""What partial steps of a Generator attend to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nwor_specpv import (
    CommitTail,
    CompactView,
    CompactViews,
    PartialStore,
    PartialView,
    SpecPVConfig,
)
from nwor_specpv.partial import Batch


class Views:
    """Views of a call's requests: lists of blocks in the cache, or with compact storage copies.

    All tensors keep their addresses, so captured steps may read them.
    """

    def __init__(
        self,
        config: SpecPVConfig,
        caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        max_requests: int,
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self.config = config
        sides = [list(side) for side in zip(*caches, strict=True)]
        self.store = PartialStore(
            config, *sides, max_requests=max_requests, max_tokens=max_tokens, max_rows=max_rows
        )
        compact = config.specpv_storage == "compact"
        self.compact = CompactViews(self.store, *sides) if compact else None

    @property
    def bytes(self) -> int:
        """Memory of views and block summaries, on the model's device."""
        return self.store.bytes + (0 if self.compact is None else self.compact.bytes)

    def begin(self, batch: Batch, block_table: torch.Tensor) -> None:
        """Makes this step's views. `batch[i]` is the request at place i, None: it has no rows."""
        self.store.begin(batch)
        self.store.build_views(block_table)
        if self.compact is not None:
            self.compact.update(batch)

    def view(self, layer: int) -> PartialView | CompactView:
        return (self.compact or self.store).view(layer)

    def tail(self, root_slots: torch.Tensor) -> CommitTail | None:
        """What the step's commit feeds: copies of accepted rows. `root_slots`: [max_requests]."""
        return None if self.compact is None else self.compact.tail(root_slots)
