"""Which blocks of the context partial steps attend to, for a report."""

from __future__ import annotations

from collections import Counter
from typing import Any

from nwor_specpv import PartialStore, SlotAllocator
from nwor_specpv.transformers.request import Part


class ViewLog:
    """Records the views of a call: `generator.generate(..., view_log=log)`, then `log.views`.

    It keeps the first request's views in the middle layer, one for every choice of blocks, with the
    tail of its last partial step. Recording waits for the device.
    """

    def __init__(self) -> None:
        self._views: dict[int, dict[str, Any]] = {}  # by the tokens that full attention has seen

    @property
    def views(self) -> list[dict[str, Any]]:
        """Plain numbers, for JSON.

        `sink`, `window`, `tail` and `context` are in tokens: where the sink ends, where window and
        tail begin, and the length. `chosen` has the retrieved blocks, each with the number of KV
        heads that read it, of `heads`.
        """
        return list(self._views.values())

    def note(self, store: PartialStore, allocator: SlotAllocator, parts: list[Part]) -> None:
        """Called after a step, with the store that made its views."""
        for part in parts:
            decision = part.decision
            if part.request.index == 0 and decision is not None and decision.kind == "partial":
                self._views[decision.full_len] = self._view(store, allocator, part)

    def _view(self, store: PartialStore, allocator: SlotAllocator, part: Part) -> dict[str, Any]:
        count = max(0, int(store.num_blocks[0]))  # -1: the whole prefix is seen
        blocks, size = store.blocks(store.num_layers // 2)[0, :, :count], store.budget.block_size
        in_page = allocator.page_size // size
        place = {page: index for index, page in enumerate(allocator.pages(part.request.key))}
        heads = Counter(
            place[block // in_page] * in_page + block % in_page
            for block in blocks.flatten().tolist()
        )
        segments = part.request.partial.segments
        first, last = (token // size for token in segments["candidates"])
        return {
            "sink": segments["sink"][1],
            "window": segments["window"][0],
            "tail": segments["tail"][0],
            "context": part.decision.committed_len,
            "block": size,
            "heads": blocks.shape[0],
            "chosen": [[b, heads[b]] for b in sorted(heads) if first <= b < last],
        }
