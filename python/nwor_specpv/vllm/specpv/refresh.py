"""Mode `refresh`: the verify step itself attends to the view. Not lossless.

Every request decides for itself, step by step: over the whole context with a new choice of blocks,
or over the view. K/V of partial steps stays as partial attention made it; nothing is fed again.
Decisions and views are device tensors (`num_blocks` -1: the whole context), so one captured graph
is replayed for every mix.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nwor_specpv import _C, PartialView
from nwor_specpv.errors import logger
from nwor_specpv.vllm.backend.caches import views_of

from .drift import DriftProbe
from .refresh_requests import RefreshDecision, RefreshRequests
from .views import ViewBatch, ViewStore


@dataclass
class RefreshStep:
    """What a layer needs of the step that is open."""

    views: RefreshViews
    count: int  # requests, from the front of the batch
    max_rows: int
    index: torch.Tensor | None  # [count, rows] rows of the batch; None: every request has max_rows
    query_rows: torch.Tensor | None  # [count, 2] int32
    row_requests: torch.Tensor | None  # [rows] int64: whose row it is; None: as `index`
    width: int  # rows of a request whose queries choose
    selects: bool
    probes: bool

    def view(self, layer: str) -> PartialView:
        return self.views.store.view(self.views.layer_index[layer], self.count)

    def after(self, layer: str, attend: Any, query: torch.Tensor, output: torch.Tensor) -> None:
        """Keeps the queries that choose blocks, and looks for drift.

        `attend(view)`: the layer's attention over a view.
        """
        views = self.views
        number = views.layer_index[layer]
        if self.probes and number in views.drift.layers:
            views.drift.look(number, self.count, self.row_requests, attend, output)
        if self.selects:
            rows = query if self.index is None else query[self.index].flatten(0, 1)
            views.queries(number, rows).copy_(rows)


class RefreshViews:
    """Views of one engine's requests, step by step. Thread-safety: none."""

    def __init__(
        self,
        settings: Any,
        layers: Sequence[str],
        key_caches: list[torch.Tensor],
        *,
        max_batch: int,
        max_tokens: int,
        max_rows: int,
        num_heads: int,
        dtype: torch.dtype,
        key_scales: Sequence[torch.Tensor] = (),
    ) -> None:
        self.layer_index = {name: number for number, name in enumerate(layers)}
        self.store = ViewStore(
            settings.specpv(),
            key_caches,
            max_requests=settings.specpv_max_requests,
            max_batch=max_batch,
            max_tokens=max_tokens,
            max_rows=max_rows,
            key_scales=key_scales,
            dtype=dtype,
        )
        bytes_per_token = 2 * sum(cache[0, 0].nbytes for cache in key_caches)
        self.requests = RefreshRequests(self.store, max_rows, bytes_per_token)
        self._step: RefreshStep | None = None
        self._any_views = False  # the device knows of requests that have one
        self._problem = ""  # why blocks could not be chosen, as logged last
        self._queries = torch.zeros(
            (len(layers), max_batch * max_rows, num_heads, key_caches[0].shape[3]),
            dtype=dtype,
            device=key_caches[0].device,
        )
        self.drift = DriftProbe(self.store, max_batch)

    # ---- a step ---------------------------------------------------------------------------------

    def begin(
        self,
        names: Sequence[str],
        lens: Sequence[int],
        drafts: Sequence[int],
        contexts: Sequence[int],
        prefilling: Sequence[bool],
        prefix_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> RefreshStep | None:
        """Opens a step. `names` may be fewer than `lens`: those behind only fill the batch.

        `prefix_lens`, `block_table`: of the requests at the front that may see views. None: there
        are none.
        """
        self.requests.give_up()  # a step that was begun and never finished
        self._step = None
        real, count = len(names), prefix_lens.shape[0]
        decisions = self.requests.decide(
            names, contexts[:real], lens[:real], drafts[:real], prefilling[:real], count
        )
        if count == 0:
            return None
        return self._tell(decisions[:count], lens[:count], prefix_lens, block_table)

    def capture(
        self, lens: Sequence[int], prefix_lens: torch.Tensor, block_table: torch.Tensor
    ) -> RefreshStep:
        """A step that is only recorded into a CUDA graph: it does all a step may do."""
        step = self._tell([], lens, prefix_lens, block_table)
        step.selects = step.probes = True
        self._step = None
        return step

    def _tell(
        self,
        decisions: list[RefreshDecision],
        lens: Sequence[int],
        prefix_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> RefreshStep:
        count, device = len(lens), prefix_lens.device
        decisions = decisions + [RefreshDecision()] * (count - len(decisions))
        self._make_views(decisions, prefix_lens, block_table)
        probes = any(d.probe for d in decisions)
        uniform = len(set(lens)) == 1
        most = max(lens)
        starts = [sum(lens[:b]) for b in range(count)]
        selecting = [n for n, d in zip(lens, decisions, strict=True) if d.select]
        width = max(selecting, default=1)
        index = query_rows = None
        if not uniform:
            rows = [
                [s + min(j, max(0, n - 1)) for j in range(width)]
                for s, n in zip(starts, lens, strict=True)
            ]
            index = _to_device(rows, torch.int64, device)
            query_rows = _to_device([[0, max(1, min(n, width))] for n in lens], torch.int32, device)
        owners = None
        if not uniform:
            owned = [b for b, n in enumerate(lens) for _ in range(n)]
            owners = _to_device(owned, torch.int64, device)
        width = most if uniform else width
        self._step = RefreshStep(
            self, count, most, index, query_rows, owners, width, bool(selecting), probes
        )
        return self._step

    def _make_views(
        self, decisions: list[RefreshDecision], prefix_lens: torch.Tensor, block_table: torch.Tensor
    ) -> None:
        """Views of the step on the device; short steps feel every launch."""
        store = self.store
        if all(d.row < 0 for d in decisions):
            if self._any_views:
                store.num_blocks.fill_(-1)
            self._any_views = False
            self.drift.rest()
            return
        self._any_views = True
        told = [[d.row, d.select, d.partial, d.probe] for d in decisions]
        flags = _to_device(told, torch.int32, prefix_lens.device).T.contiguous()
        selects = any(d.select for d in decisions)
        batch = ViewBatch(block_table, flags[0], prefix_lens, flags[1])
        store.begin(batch, flags[2], selects=selects)
        if any(d.probe for d in decisions):
            self.drift.build(block_table, flags[3])
        else:
            self.drift.rest()
        store.build(len(decisions))

    def finish(self) -> None:
        """The model has run: blocks are chosen by the queries that its layers left here.

        Outside of the model's graph, so that steps in which nobody chooses do not pay for it.
        """
        step, self._step = self._step, None
        if step is not None and self.requests.selects:
            try:
                for layer in range(len(self.layer_index)):
                    rows = self._queries[layer, : step.count * step.width]
                    grouped = rows.unflatten(0, (step.count, step.width))
                    self.store.refresh_layer(layer, grouped, step.query_rows)
                self.store.end(step.count)
            except Exception as error:
                self._tell_problem(error)
                self.requests.give_up("refresh_failure")
        self.requests.end()
        self.drift.read()

    def _tell_problem(self, error: Exception) -> None:
        """Once, and not in every step that it keeps full."""
        problem = f"{type(error).__name__}: {error}"
        if problem != self._problem:
            self._problem = problem
            logger.warning(
                "nwor_specpv: blocks could not be selected, so steps stay full: %s", problem
            )

    def queries(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Where a layer leaves its queries for `finish`; the same memory in every step."""
        return self._queries[layer, : rows.shape[0]]


class Refresh:
    """Mode `refresh` of one engine: makes the views when caches are there, opens steps."""

    def __init__(self, engine: Any, vllm_config: Any) -> None:
        self._engine = weakref.ref(engine)
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        rows = 1 + engine.setup.num_speculative_tokens  # of each request in a graph
        self._max_batch = max(vllm_config.scheduler_config.max_num_seqs, -(-graphs // rows))
        self._model = vllm_config.model_config  # vLLM may lower its length at start
        self.view_tokens = engine.settings.specpv().budget(rows).static_tokens
        self.views: RefreshViews | None = None
        self._lossy = _C.LossyEngine()  # counted by `specpv_lossy_engines`
        self._without = False  # views could not be made while requests were served

    def step(
        self,
        layers: list[str],
        lens: Sequence[int],
        drafts: Sequence[int],
        common: Any,
        prefix_lens: torch.Tensor,
        *,
        capture: bool = False,
    ) -> RefreshStep | None:
        """The step of a batch, for its first requests, as many as `prefix_lens` has; None: none of
        them sees a view. Those behind are not ours to attend to: they are counted as full.

        Before vLLM's first tokens nobody knows their names, and all are full.
        """
        engine, count = self._engine(), prefix_lens.shape[0]
        real = sum(1 for n in lens if n)  # padding has no rows and stands last
        if capture and count == 0:
            return None
        if self.views is None and not self._without:
            try:
                self.views = self._make(engine, layers)
            except Exception as error:
                if capture:  # vLLM is starting: whoever starts it learns why
                    raise
                self._without = True
                logger.warning(
                    "nwor_specpv: views could not be made, so all steps are full: %s", error
                )
        if self.views is None:
            _C.count_full_steps("refresh_failure", real)
            return None
        table = common.block_table_tensor[:count]
        if capture:
            return self.views.capture(lens[:count], prefix_lens, table)
        names = engine.request_names() if engine.runner is not None else ()
        ends = common.seq_lens_cpu_upper_bound
        if ends is None:
            ends = common.seq_lens_cpu
        ends = ends[: len(lens)].tolist()
        contexts = [end - n for end, n in zip(ends, lens, strict=True)]
        names = names[:real]
        prefilling = engine.prefilling(names, ends, drafts, common)
        return self.views.begin(names, lens, drafts, contexts, prefilling, prefix_lens, table)

    def finish(self) -> None:
        """The model has run."""
        if self.views is not None:
            self.views.finish()

    def _make(self, engine: Any, layers: list[str]) -> RefreshViews:
        seen = [views_of(engine.layers[name]) for name in layers]
        caches = [key for (key, _), _ in seen]
        views = RefreshViews(
            engine.settings,
            layers,
            caches,
            max_batch=self._max_batch,
            max_tokens=self._model.max_model_len,
            max_rows=1 + engine.setup.num_speculative_tokens,
            num_heads=engine.layers[layers[0]].impl.num_heads,
            dtype=self._model.dtype,
            key_scales=[scales[0] for _, scales in seen if scales],
        )
        taken = views.store.bytes / 1e6
        logger.info(
            "nwor_specpv: views of %d requests take %.1f MB", views.store.max_requests, taken
        )
        return views


def _to_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
