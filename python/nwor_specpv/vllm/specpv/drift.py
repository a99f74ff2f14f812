"""Drift of mode `refresh`, measured on full steps.

In a few layers the rows of requests with a full step are attended over the view they have had up to
then, too. Rows whose output differs by more than a tenth in length are counted on the device, and
from there in the metrics: specpv_deviating_rows_total of specpv_probed_rows_total.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from nwor_specpv import _C, PartialView, build_view

from .late_counts import LateCounts
from .views import ViewStore

_DEVIATES = 0.1
_READ_INTERVAL = 32  # steps between readings of the device's counts


class DriftProbe:
    """The old views of a step's requests in two layers, and what was counted.

    All a captured step touches keeps its address.
    """

    def __init__(self, store: ViewStore, max_batch: int) -> None:
        last = len(store.key_caches) - 1
        self.layers = sorted({last // 2, last})
        self._store = store
        device = store.num_blocks.device
        shape = (len(self.layers) * max_batch, *store.blocks(1).shape[2:])
        self._lists = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._num_blocks = torch.zeros_like(store.num_blocks)
        self._lens = torch.zeros_like(store.view_lens)
        self._asked = torch.zeros_like(store.view_lens)
        self._looks = False  # somebody is asked for in the views below
        self._counts = LateCounts(2, device)
        self._steps = 0

    def build(self, block_table: torch.Tensor, asked: torch.Tensor) -> None:
        """The views that requests have now, before they choose anew. `asked` [B]: 1: look at it."""
        store, count = self._store, asked.shape[0]
        self._looks = True
        self._asked[:count] = asked
        blocks, anchors = self._blocks(count), store.anchors[store.places(count)]
        for place, layer in enumerate(self.layers):
            build_view(
                store.ids[layer : layer + 1],
                block_table,
                anchors,
                store.lens(count),
                self._asked[:count],
                blocks[place : place + 1],
                self._num_blocks[:count],
                self._lens[:count],
                page_size=store.page_size,
                block_size=store.budget.block_size,
                sink_blocks=store.budget.sink_blocks,
                window_blocks=store.budget.window_blocks,
                rows=store.rows(count),
            )
        # The others see nothing of their context here, instead of all of it.
        absent = self._num_blocks[:count] < 0
        self._asked[:count].masked_fill_(absent, 0)
        self._num_blocks[:count].clamp_(min=0)
        self._lens[:count].masked_fill_(absent, 0)

    def rest(self) -> None:
        """Nobody is asked for; a graph looks all the same."""
        if self._looks:
            self._looks = False
            for tensor in (self._asked, self._num_blocks, self._lens):
                tensor.zero_()

    def look(
        self,
        layer: int,
        count: int,
        row_requests: torch.Tensor | None,
        attend: Callable[[PartialView], torch.Tensor],
        output: torch.Tensor,
    ) -> None:
        """Counts rows whose attention over the old view differs from `output` [rows, Hq, D].

        `row_requests` [rows] int64: whose row it is; None: all requests have as many.
        """
        view = PartialView(
            self._blocks(count)[self.layers.index(layer)],
            self._num_blocks[:count],
            self._lens[:count],
            self._store.budget.block_size,
        )
        seen, whole = attend(view).flatten(1).float(), output.flatten(1).float()
        asked = self._asked[:count] != 0
        if row_requests is not None:
            asked = asked[row_requests]
        else:
            asked = asked[:, None].expand(count, whole.shape[0] // count).reshape(-1)
        far = (seen - whole).norm(dim=1) > _DEVIATES * whole.norm(dim=1)
        self._counts.counts[0] += asked.sum()
        self._counts.counts[1] += (asked & far).sum()

    def read(self) -> None:
        """Brings the counts to the metrics; on a GPU a little later, without waiting."""
        self._steps += 1
        new = self._counts.read(send=self._steps % _READ_INTERVAL == 0)
        if new is not None:
            _C.count("specpv_probed_rows_total", new[0])
            _C.count("specpv_deviating_rows_total", new[1])

    def _blocks(self, count: int) -> torch.Tensor:
        layers = len(self.layers)
        return self._lists[: layers * count].unflatten(0, (layers, count))
