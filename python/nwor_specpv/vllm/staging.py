"""The interceptor of one engine, over the caches of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nwor_specpv import ContractChecker, Interceptor, Metrics
from nwor_specpv.config import Settings
from nwor_specpv.errors import NworError, logger

from .backend.caches import views_of
from .faults import Faults

# The value of `agreement_group` that means this engine's tensor-parallel ranks.
TENSOR_PARALLEL = "tp"


class Staging:
    """Groups of layers that stage, bound to an interceptor as soon as they have caches.

    Thread-safety: none.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        settings: Settings,
        vllm_config: Any,
        max_drafts: int,
        faults: Faults,
    ) -> None:
        """`max_drafts`: of a full batch."""
        self.layers = layers
        self.groups: list[list[str]] = []  # names of layers that share one slot mapping
        self.bound: dict[str, int] = {}  # layer -> address of its cache
        self.interceptor: Interceptor | None = None
        self.checker: ContractChecker | None = None
        self.violations: list[str] = []
        self._faults = faults
        self._settings = settings
        self._watched = settings.check_contract
        self._parallel = vllm_config.parallel_config
        self._has_connector = vllm_config.kv_transfer_config is not None
        self._dtype = vllm_config.model_config.dtype  # of K and V before a cache quantises them
        self._max_drafts = max_drafts
        self._max_graph_rows = vllm_config.compilation_config.max_cudagraph_capture_size or 0

    def serve_metrics(self) -> None:
        """Opens this worker's endpoint, if one was asked for. REQUIRES: vLLM knows its rank."""
        if self._settings.metrics_port is None:
            return
        from vllm.distributed.parallel_state import get_world_group

        rank = worker_of_host(get_world_group().local_rank, self._parallel)
        Metrics().serve_settings(self._settings, {"LOCAL_RANK": str(rank)})

    def bind(self, device: torch.device) -> Interceptor:
        """Binds every layer whose cache is new. REQUIRES: no open round."""
        if self.interceptor is None:
            self.interceptor = self._make_interceptor(device)
        for group, names in enumerate(self.groups):
            for name in names:
                cache = self.layers[name].kv_cache
                if self.bound.get(name) != cache.data_ptr():
                    caches, scales = views_of(self.layers[name])
                    dtype = self._dtype if scales else None
                    self.interceptor.bind_layer(name, *caches, group, *scales, dtype=dtype)
                    self.bound[name] = cache.data_ptr()
        if self._watched and self.checker is None:
            self._watch()
        return self.interceptor

    def writes_single_rows(self, lens: Sequence[int], drafts: Sequence[int]) -> bool:
        """Whether vLLM itself writes the rows of a step: one of each request, none a draft. A
        contract checker sees such steps, too."""
        return not self._watched and not any(drafts) and max(lens, default=0) <= 1

    @property
    def agrees(self) -> bool:
        """Whether ranks agree on each commit before any of them writes."""
        return bool(self._settings.agreement_group)

    def release(self) -> None:
        """Lets go of every cache; the next `bind` starts afresh. REQUIRES: no open round."""
        self.interceptor = self.checker = None
        self.bound.clear()

    def note(self, violations: Sequence[Any]) -> None:
        """Remembers what the checker found, says it, and raises with `strict`. The cache is wrong
        then: requests are computed again, and drafts end."""
        for violation in violations:
            self.violations.append(repr(violation))
            logger.error("nwor_specpv: the contract checker found %r; report this line", violation)
        if violations and self._settings.strict:
            raise NworError(f"the contract checker found {violations[0]!r}; report this line")
        if violations:
            self._faults.lose("contract_violation", "the commit contract was broken")

    def _watch(self) -> None:
        """Sets the contract checker on the caches, if nobody else writes to them."""
        problem = self._foreign_writes()
        if problem is not None:
            logger.warning("nwor_specpv: check_contract is ignored: %s", problem)
            self._watched = False
            return
        self.checker = ContractChecker(self.interceptor)

    def _foreign_writes(self) -> str | None:
        """Whose writes the checker would take for damage."""
        if self._has_connector:
            return "a KV connector loads blocks at any time"
        places = Counter(place for layer in self.layers.values() for place in _places(layer))
        if any(places[place] > 1 for place in self.bound.values()):
            # vLLM lets layers of different groups, its own too, share memory, block by block.
            return "layers of this model share cache memory"
        return None

    def _rows_to_reserve(self, config: Any) -> int:
        """Drafts of a full batch, as far as there is room; it does not grow."""
        wanted = max(config.staging_rows, self._max_drafts)
        room = config.max_staging_bytes // self._bytes_per_row()
        found = rows_in_room(wanted, config.graph_rows, room)
        if room < wanted:
            logger.warning(
                "nwor_specpv: max_staging_bytes holds %d drafts, but a full batch has %d: steps "
                "with more than %d drafts are written directly; raise max_staging_bytes or lower "
                "--max-num-seqs",
                room,
                self._max_drafts,
                found if found <= room else 0,
            )
        return found

    def _bytes_per_row(self) -> int:
        """What staging takes for a draft, over all layers, and its slot in each group."""
        found = 8 * len(self.groups)
        for name in (name for names in self.groups for name in names):
            (key, value), scales = views_of(self.layers[name])
            size = (self._dtype if scales else key.dtype).itemsize
            found += size * (key[0, 0].numel() + value[0, 0].numel())
        return found

    def _make_interceptor(self, device: torch.device) -> Interceptor:
        config = self._settings.nwor()
        if device.type == "cuda":
            config.graph_rows = max(1, self._max_graph_rows)
            config.staging_rows = self._rows_to_reserve(config)
        if config.agreement_group == TENSOR_PARALLEL:
            from vllm.distributed.parallel_state import get_tp_group

            config.agreement_group = get_tp_group().device_group.group_name
        return Interceptor(config)


def _places(layer: Any) -> list[int]:
    """Where a layer's cache lies; that of a state-space layer is several tensors."""
    cache = getattr(layer, "kv_cache", ())
    tensors = [cache] if isinstance(cache, torch.Tensor) else cache
    return [tensor.data_ptr() for tensor in tensors]


def worker_of_host(local_rank: int, parallel: Any) -> int:
    """A worker's number among those of its host. vLLM numbers those of a data-parallel rank from 0
    on a CPU, and all of them on GPUs.
    """
    if local_rank >= parallel.world_size:
        return local_rank
    return local_rank + (parallel.data_parallel_rank_local or 0) * parallel.world_size


def rows_in_room(wanted: int, graph_rows: int, room: int) -> int:
    """Draft rows to reserve: `wanted`, or what there is room for.

    A graph is captured with staging or without it, so those of a graph must fit, or nothing does:
    then `wanted` is asked for all the same, and never had.
    """
    return room if graph_rows <= room < wanted else wanted
