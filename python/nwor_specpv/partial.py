"""Partial verification for a batch: what a host keeps for its requests, and one step's views."""

from __future__ import annotations

from ._C import StepDecision, StoredCache, _PartialStore
from .ops.attention import PartialView

__all__ = ["PartialStore"]


class PartialStore(_PartialStore):
    """Summaries, chosen blocks and views of `max_requests` requests in every layer.

        store = PartialStore(config, key_caches, value_caches, max_requests=8, max_tokens=131072,
                             max_rows=64)
        cache = store.open(prompt_tokens)            # a PartialCache with a row of the store
        cache.prefill(prompt_tokens)
        decision = policy.decide(cache, num_rows)    # full, full_refresh or partial
        store.begin([(cache, decision)])             # tells the device
        store.build_views(block_table)               # capturable from here on
        for layer in layers:                         # write K/V as ever, then
            store.refresh_layer(layer, query, block_table)
            verify_attention(..., view=store.view(layer))
        cache.finish(decision, accepted)

    A step's batch has `max_requests` requests: block tables are padded to it, and places beyond
    the batch, or None in it, see their whole prefix. Dropping a cache frees its row.
    """

    def view(self, layer: int) -> PartialView:
        """The view of a layer for `verify_attention`; the same tensors in every step."""
        return PartialView(
            self.blocks(layer), self.num_blocks, self.view_lens, self.budget.block_size
        )


Batch = list[tuple[StoredCache, StepDecision] | None]
