"""CPU_ATTN with our layout, write and attention.

vLLM's own CPU kernels pack K and V for their instruction set, so single rows cannot be staged and
put back there. Layers of the target model therefore keep plain rows (K beside V, the layout
vLLM's GPU backends use) and attention is computed by our kernels; layers of a drafter, layers we do
not support and engines without speculation stay with vLLM's own implementation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from nwor_specpv import PartialView, verify_attention
from nwor_specpv.errors import NworError
from nwor_specpv.vllm import draft_rows
from nwor_specpv.vllm.engine import StepSeen
from nwor_specpv.vllm.specpv.partial_pass import PartialPass
from nwor_specpv.vllm.specpv.refresh import RefreshStep
from nwor_specpv.vllm.tree.level import TreeLevel
from nwor_specpv.vllm.tree.store import StepTrees

from .caches import key_value_of, write_direct
from .layer import TargetLayer, choose_impl, engine_of_layer, own_layers


@dataclass
class NworCpuMetadata(CPUAttentionMetadata):
    """vLLM's metadata and the tokens each request has in the cache before this step's rows."""

    prefix_lens: torch.Tensor | None = None  # [B] int32
    trees: StepTrees | None = None  # None: drafts are chains
    refresh: RefreshStep | None = None


class NworCpuBackend(CPUAttentionBackend):
    """Chosen by vLLM on the CPU whatever is asked; stands aside where there is nothing to stage."""

    supports_kv_cache_update_bypass = False  # as in `cuda`

    @classmethod  # vLLM's is static and is called the same way
    def get_impl_cls(cls) -> type[CPUAttentionBackendImpl]:
        return choose_impl(NworCpuImpl, cls, NworCpuMetadataBuilder, {"trees": TreeHeadCpuImpl})

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return NworCpuMetadataBuilder


class NworCpuMetadataBuilder(CPUAttentionMetadataBuilder):
    """Opens the round of a step. A builder without layers of ours is vLLM's own."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._own = own_layers(vllm_config, layer_names)
        if self._own:
            self._engine = engine_of_layer(vllm_config, self._own[0])
            self._group = self._engine.add_group(self._own)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if not self._own or fast_build:  # a fast build is the drafter's
            return metadata
        common = common_attn_metadata
        lens = draft_rows.query_lens(common.query_start_loc_cpu, common.num_reqs)
        drafts = self._engine.drafts(lens, common)
        trees = self._engine.trees
        self._engine.steps.begin(
            self._group, lens, drafts, common.slot_mapping, trees=trees is not None
        )
        self._engine.seen = StepSeen(lens, drafts, common.block_table_tensor)
        prefix = common.seq_lens[: len(lens)] - torch.tensor(lens, dtype=torch.int32)
        refresh = None
        if self._engine.refresh is not None:
            refresh = self._engine.refresh.step(self._own, lens, drafts, common, prefix)
        step = trees.step if trees is not None else None
        return NworCpuMetadata(**vars(metadata), prefix_lens=prefix, trees=step, refresh=refresh)


class NworCpuImpl(TargetLayer, CPUAttentionBackendImpl):
    """One layer of the target model."""

    stock = CPUAttentionBackendImpl

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if not self.write(layer, key, value, slot_mapping):
            num_rows = slot_mapping.shape[0]
            caches = key_value_of(kv_cache)
            write_direct(caches, key[:num_rows], value[:num_rows], slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: NworCpuMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # profiling: shapes only
            return output
        if isinstance(attn_metadata, PartialPass):
            return attn_metadata.attend(self, layer, query, key, value, kv_cache, output)
        if attn_metadata.causal is not True or output_scale is not None:
            raise NworError(
                f"nwor_specpv: {layer.layer_name} has attention that is not causal, or a quantised "
                'output; serve this model with "enable_nwor": false'
            )
        num_rows = attn_metadata.num_actual_tokens
        refresh = attn_metadata.refresh
        step = RowsInFlight(attn_metadata, query[:num_rows], key[:num_rows], value[:num_rows])

        def attend(view: PartialView | None, out: torch.Tensor | None = None) -> torch.Tensor:
            return step.attend(self, kv_cache, out, view)

        name, out = layer.layer_name, output[:num_rows]
        if attn_metadata.trees is not None:
            step.attend_trees(self, kv_cache, out, attn_metadata.trees)
            return output
        attend(None if refresh is None else refresh.view(name), out)
        if refresh is not None:
            refresh.after(name, attend, query[:num_rows], out)
        return output


class TreeHeadCpuImpl(CPUAttentionBackendImpl):
    """A layer of an EAGLE head that grows trees. Its cache keeps plain rows, as the target's."""

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        num_rows = slot_mapping.shape[0]
        write_direct(key_value_of(kv_cache), key[:num_rows], value[:num_rows], slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | TreeLevel | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        if isinstance(attn_metadata, TreeLevel):
            return attn_metadata.attend(self, layer, query, key, value, kv_cache, output)
        num_rows = attn_metadata.num_actual_tokens
        rows = RowsInFlight(attn_metadata, query[:num_rows], key[:num_rows], value[:num_rows])
        rows.attend(self, kv_cache, output[:num_rows])
        return output


class RowsInFlight:
    """The rows of a step in one layer."""

    def __init__(
        self,
        metadata: CPUAttentionMetadata,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        self._metadata, self._rows = metadata, (query, key, value)
        self._prefix = getattr(metadata, "prefix_lens", None)
        if self._prefix is None:
            start = metadata.query_start_loc
            self._prefix = metadata.seq_lens[: start.shape[0] - 1] - start[1:] + start[:-1]

    def attend(
        self,
        impl: CPUAttentionBackendImpl,
        kv_cache: torch.Tensor,
        out: torch.Tensor | None,
        view: PartialView | None = None,
        *,
        requests: slice = slice(None),
        rows: slice = slice(None),
        tree_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of `rows`, which are those of `requests`."""
        metadata = self._metadata
        start = metadata.query_start_loc
        first, last = requests.indices(start.shape[0] - 1)[:2]
        return verify_attention(
            *(part[rows] for part in self._rows),
            *key_value_of(kv_cache),
            metadata.block_table[first:last],
            self._prefix[first:last],
            start[first : last + 1] - start[first] if first else start[: last + 1],
            tree_mask,
            impl.scale,
            view=view,
            window=max(0, impl.sliding_window),
            softcap=impl.logits_soft_cap,
            out=out if out is None else out[rows],
            max_rows=metadata.max_query_len,
        )

    def attend_trees(
        self,
        impl: CPUAttentionBackendImpl,
        kv_cache: torch.Tensor,
        out: torch.Tensor,
        trees: StepTrees,
    ) -> None:
        """Attention of a step with trees: those at the front under their mask, then the others."""
        count, num_rows = trees.num_requests, trees.mask.shape[0]
        front = {"requests": slice(0, count), "rows": slice(0, num_rows)}
        self.attend(impl, kv_cache, out, tree_mask=trees.mask, **front)
        if num_rows < out.shape[0]:
            behind = {"requests": slice(count, None), "rows": slice(num_rows, None)}
            self.attend(impl, kv_cache, out, **behind)
