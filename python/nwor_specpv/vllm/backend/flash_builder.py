"""Metadata of a step for the CUDA backend: the batch split in two, the round of the step opened.

Batches in which every request has one row more than there are drafts are captured in full CUDA
graphs, for every number of drafts that vLLM may choose. A graph is replayed without our Python, so
everything it touches lies in buffers that keep their address, and `build`, which runs before every
replay, fills them.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from nwor_specpv import _C, verify_plan
from nwor_specpv.errors import NworError
from nwor_specpv.vllm import draft_rows, versions
from nwor_specpv.vllm.engine import StepSeen
from nwor_specpv.vllm.registry import find_engine
from nwor_specpv.vllm.specpv.refresh import RefreshStep

from .caches import views_of
from .flash_head import HeadFlashImpl, head_window, of_window
from .flash_metadata import NworFlashMetadata, VerifyPart
from .layer import engine_of_layer, own_layers
from .plan_buffers import PlanBuffers
from .prefix_planner import PrefixPlanner


class NworFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Opens the round of a step and splits the batch. Without layers of ours it is vLLM's own."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        engine = find_engine(vllm_config)
        if engine is None or engine.off is not None:
            return FlashAttentionMetadataBuilder._cudagraph_support
        # The checker looks at every write from outside, which a replayed graph does not allow.
        return (
            AttentionCGSupport.NEVER if engine.settings.check_contract else cls._cudagraph_support
        )

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._own = own_layers(vllm_config, layer_names)
        self._latest = head_window(vllm_config, layer_names)
        if self._latest is not None:
            self.aot_sliding_window = self._latest  # schedules that it makes in advance are such
        if not self._own:
            return
        self.supports_update_block_table = False  # each group has a plan and slots of its own
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._engine = engine_of_layer(vllm_config, self._own[0])
        self._layer = self._engine.layers[self._own[0]]
        self._group = self._engine.add_group(self._own)
        impls = [self._engine.layers[name].impl for name in self._own]
        self._plans_ours = not all(impl.flash_prefix for impl in impls)
        self._plans_flash = any(impl.flash_prefix for impl in impls)
        self._uniform_rows = self._engine.uniform_rows
        limit = max(vllm_config.scheduler_config.max_num_seqs, self.max_cudagraph_size or 0)
        self._prefix_lens = torch.zeros(limit, dtype=torch.int32, device=device)
        self._plans = PlanBuffers(device)
        self._prefixes = PrefixPlanner(self, impls[0].kv_cache_dtype, device)
        self._find_window(vllm_config)

    def _find_window(self, vllm_config: Any) -> None:
        """What vLLM's builder finds at its first build, if that schedules; ours need not."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        impls = [getattr(layer, "impl", None) for layer in layers]
        ours = (i for i in impls if isinstance(i, FlashAttentionImpl))
        windows = {i.sliding_window for i in ours if not isinstance(i, HeadFlashImpl)}
        self.aot_sliding_window = (-1, -1)
        if len(windows) == 1:
            self.aot_sliding_window = windows.pop() or (-1, -1)
        elif windows:
            self.aot_schedule = False

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> FlashAttentionMetadata:
        if not self._own or fast_build:  # a fast build is the drafter's
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            return metadata if self._latest is None else of_window(metadata, self._latest)
        return self._build(common_attn_metadata, capture=False)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> FlashAttentionMetadata:
        if not self._own:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return self._build(common_attn_metadata, capture=True)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        return not self._own and super().use_cascade_attention(*args, **kwargs)

    def _build(self, common: CommonAttentionMetadata, *, capture: bool) -> FlashAttentionMetadata:
        if common.causal is not True:
            raise NworError(
                f"nwor_specpv: {self._own[0]} has attention that is not causal; serve this model "
                'with "enable_nwor": false'
            )
        if common.max_query_len <= 1 and self._engine.leaves_single_rows:
            self._engine.steps.abort()  # the last one, if it did not end
            return self._single_rows(common)
        lens = draft_rows.query_lens(common.query_start_loc_cpu, common.num_reqs)
        drafts = [max(0, n - 1) for n in lens] if capture else self._engine.drafts(lens, common)
        real = draft_rows.without_padding(lens)
        uniform = lens[0] if lens and lens[0] in self._uniform_rows else self._uniform_rows[0]
        count = draft_rows.verify_requests(lens, drafts, uniform)
        self._engine.steps.begin(
            self._group,
            lens[:real],
            drafts[:real],
            common.slot_mapping,
            capture,
            # Requests behind read their rows from the cache, and so do hits of the prefix cache.
            may_defer=count >= real and (capture or not self._engine.prefix_hits),
            trees=self._engine.trees is not None,
        )
        if not capture:
            table = common.block_table_tensor[:real]
            self._engine.seen = StepSeen(lens[:real], drafts[:real], table)
        if count == 0:
            self._refresh(lens, drafts, common, self._prefix_lens[:0], capture=capture)
            return super().build(0, common)
        metadata = super().build(0, common, fast_build=True)
        rest = None
        num_rows = common.num_actual_tokens
        if count < real:
            num_rows = sum(lens[:count])
            rest = super().build(0, behind(common, count, num_rows, max(lens[count:])))
        verify = self._verify_part(common, lens[:count], num_rows)
        if self._engine.trees is not None:
            verify.tree_mask = self._engine.trees.mask_of(num_rows, capture=capture)
        verify.refresh = self._refresh(lens, drafts, common, verify.prefix_lens, capture=capture)
        if self._plans_ours:
            self._plan(verify, capture=capture)
        if self._plans_flash:
            verify.prefix = self._prefixes.plan(
                common, verify.prefix_lens, verify.query_start, num_rows, verify.max_rows
            )
        return NworFlashMetadata(**vars(metadata), verify=verify, rest=rest)

    def _single_rows(self, common: CommonAttentionMetadata) -> FlashAttentionMetadata:
        """vLLM's own attention of requests with one row each, whose plan cuts as finely as ours."""
        if not self._plans_flash or not self.aot_schedule or self.aot_sliding_window != (-1, -1):
            return super().build(0, common)
        metadata = super().build(0, common, fast_build=True)
        count = common.num_reqs
        metadata.scheduler_metadata = self._prefixes.plan(
            common, common.seq_lens, common.query_start_loc, count, 1, causal=True
        ).metadata
        return metadata

    def _refresh(
        self,
        lens: list[int],
        drafts: list[int],
        common: CommonAttentionMetadata,
        prefix_lens: torch.Tensor,
        *,
        capture: bool,
    ) -> RefreshStep | None:
        """The step of mode `refresh`, if that is on, for the requests with these prefixes."""
        refresh = self._engine.refresh
        if refresh is None:
            return None
        return refresh.step(self._own, lens, drafts, common, prefix_lens, capture=capture)

    def _verify_part(
        self, common: CommonAttentionMetadata, lens: list[int], num_rows: int
    ) -> VerifyPart:
        count, max_rows = len(lens), max(lens)
        start = common.query_start_loc[: count + 1]
        prefix = self._prefix_lens[:count]
        if min(lens) == max_rows:  # every launch here is felt in a short step
            torch.sub(common.seq_lens[:count], max_rows, out=prefix)
        else:
            torch.sub(common.seq_lens[:count], start[1:], out=prefix).add_(start[:-1])
        uniform = {0, max_rows}.issuperset(lens)
        block_table = common.block_table_tensor[:count]
        return VerifyPart(num_rows, max_rows, uniform, block_table, prefix, start)

    def _plan(self, part: VerifyPart, *, capture: bool) -> None:
        """Plans the step's work once for all layers, in the buffer of its shape."""
        (key_cache, _), _ = views_of(self._layer)
        impl = self._layer.impl
        # Planning looks at sizes only.
        dtype = self.vllm_config.model_config.dtype
        query = key_cache.new_empty(1, 1, impl.head_size, dtype=dtype)
        query = query.expand(part.num_rows, impl.num_heads, impl.head_size)
        where = (query, key_cache, part.block_table, part.prefix_lens, part.query_start)
        view = part.refresh.view(self._own[0]) if part.refresh is not None else None
        block_size = view.block_size if view is not None else 0

        def size() -> int:
            return _C.verify_plan_bytes(*where, block_size=block_size, max_rows=part.max_rows)

        shape = (part.prefix_lens.shape[0], part.num_rows, part.max_rows, view is not None)
        part.plan = verify_plan(
            *where,
            view=view,
            window=impl.window,
            max_rows=part.max_rows,
            plan=self._plans.find(shape, size, capture=capture),
        )


def behind(
    common: CommonAttentionMetadata, count: int, num_rows: int, max_query_len: int
) -> CommonAttentionMetadata:
    """The requests after the first `count`, whose rows begin at `num_rows`."""
    fields, vllm = vars(common), versions.adapter
    parts = {name: fields[name][count:] for name in vllm.of_requests if fields[name] is not None}
    parts |= {name: fields[name][num_rows:] for name in vllm.of_rows if fields[name] is not None}
    ranges = common.mm_req_doc_ranges
    if ranges is not None:
        ranges = {request - count: of for request, of in ranges.items() if request >= count}
    return common.replace(
        **parts,
        query_start_loc=common.query_start_loc[count:] - num_rows,
        query_start_loc_cpu=common.query_start_loc_cpu[count:] - num_rows,
        num_reqs=common.num_reqs - count,
        num_actual_tokens=common.num_actual_tokens - num_rows,
        max_query_len=max_query_len,
        mm_req_doc_ranges=ranges,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
