"""A connector of our own: it saves blocks to host memory as early as any may, and loads them.

A block is saved in the first step whose plan knows all of its tokens. `when` says at which time of
that step: `layer` (as soon as a layer has run), `forward` (after the model) or `next` (before the
next step). `rows` saves what no connector should: every row of a step, drafts too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

NAME = f"{__name__}.HostConnector"


def host_connector(when: str) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`."""
    return {
        "kv_connector": "HostConnector",
        "kv_connector_module_path": __name__,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"when": when},
    }


@dataclass
class Plan(KVConnectorMetadata):
    """Hashes of blocks, and the blocks of the cache that they are loaded to or saved from."""

    loads: list[tuple[bytes, int]] = field(default_factory=list)
    saves: list[tuple[bytes, int]] = field(default_factory=list)


class HostConnector(KVConnectorBase_V1):
    """Both of its sides are in one process."""

    host: ClassVar[dict[bytes, dict[str, torch.Tensor]]] = {}  # by hash and layer
    rows: ClassVar[list[torch.Tensor]] = []
    loaded: ClassVar[list[bytes]] = []

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._when = vllm_config.kv_transfer_config.kv_connector_extra_config["when"]
        self._page = vllm_config.cache_config.block_size
        self._requests: dict[str, Any] = {}
        self._blocks: dict[str, list[int]] = {}
        self._num_saved: dict[str, int] = {}
        self._num_loads: dict[str, int] = {}  # of requests that begin
        self._caches: dict[str, torch.Tensor] = {}
        self._late: list[tuple[bytes, int]] = []

    @classmethod
    def forget(cls) -> None:
        for kept in (cls.host, cls.rows, cls.loaded):
            kept.clear()

    # ---- the scheduler ----

    def on_new_request(self, request: Any) -> None:
        self._requests[request.request_id] = request

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        begin, end = num_computed_tokens // self._page, (request.num_tokens - 1) // self._page
        found = begin
        while found < end and request.block_hashes[found] in self.host:
            found += 1
        return (found - begin) * self._page, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._num_loads[request.request_id] = num_external_tokens // self._page

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        plan = Plan()
        for new in scheduler_output.scheduled_new_reqs:
            self._begin(plan, new.req_id, new.block_ids[0], new.num_computed_tokens)
        known = scheduler_output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            if name in known.resumed_req_ids:
                self._begin(plan, name, blocks[0], computed)
            elif blocks is not None:
                self._blocks[name] += blocks[0]
        for name, count in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[name]
            end = min(request.num_computed_tokens + count, request.num_tokens) // self._page
            for place in range(self._num_saved.get(name, 0), end):
                plan.saves.append((request.block_hashes[place], self._blocks[name][place]))
            self._num_saved[name] = end
        return plan

    def _begin(self, plan: Plan, name: str, blocks: list[int], computed: int) -> None:
        self._blocks[name] = list(blocks)
        end = computed // self._page
        hashes = self._requests[name].block_hashes
        for place in range(end - self._num_loads.pop(name, 0), end):
            plan.loads.append((hashes[place], blocks[place]))
        self._num_saved[name] = end

    # ---- the worker ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        late, self._late = self._late, []
        for layer in self._caches:
            self._save(layer, late)
        if self._when == "next":
            self._late = connector_metadata.saves

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Loads before all else, so that a contract checker sees no writes within a step."""
        for key, block in kv_connector_metadata.loads:
            self.loaded.append(key)
            for layer, kept in self.host[key].items():
                self._caches[layer][block] = kept

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """All is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._when == "layer":
            self._save(layer_name, self._get_connector_metadata().saves)
        elif self._when == "rows":
            slots = attn_metadata.slot_mapping
            self.rows.append(kv_layer.transpose(1, 2).flatten(0, 1)[slots[slots >= 0]])

    def wait_for_save(self) -> None:
        if self._when == "forward":
            for layer in self._caches:
                self._save(layer, self._get_connector_metadata().saves)

    def _save(self, layer: str, saves: list[tuple[bytes, int]]) -> None:
        for key, block in saves:
            self.host.setdefault(key, {})[layer] = self._caches[layer][block].clone()
