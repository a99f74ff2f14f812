"""vLLM's FlashAttention backend with our write, and our attention for the rows that verify drafts.

Users choose it with `--attention-backend CUSTOM`. Requests that verify drafts stand first in a
batch (vLLM orders it so). Their rows in flight are never read from the cache: FlashAttention-3
attends to what is committed, and one kernel of ours adds the rows and does the layer's write beside
it, so that a layer has as many launches as in vLLM. Where that does not serve (another
FlashAttention, a sliding window, another `attention_route`) our own attention does all of it.
Requests behind them, and steps without drafts, go to FlashAttention as ever.

Batches in which every request has one row more than there are drafts are captured in full CUDA
graphs; a graph is replayed without our Python, so everything it touches lies in buffers that keep
their address, and `build`, which runs before every replay, fills them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
    flash_attn_varlen_func,
    get_flash_attn_version,
    get_scheduler_metadata,
)

from nwor_specpv import _C, PartialView, cache_views, verify_attention, verify_plan
from nwor_specpv.errors import NworError

from . import compat, prefix_schedule, rows
from .engine import StepSeen, engine_of, find_engine
from .layer import TargetLayer, choose_impl, engine_of_layer, holds_codes, own_layers
from .specpv.partial_pass import PartialPass
from .specpv.refresh import RefreshStep

# Values of `attention_route` that leave prefixes to FlashAttention-3.
FLASH_ROUTES = ("", "auto", "flash_attn_3")
# Quantised caches that we commit to, as vLLM names them.
FLOAT8 = ("fp8", "fp8_e4m3")


@dataclass
class PrefixSchedule:
    """How FlashAttention-3 shares out the attention of verifying rows to what is committed."""

    max_prefix: int
    max_splits: int  # 0: as FlashAttention likes
    metadata: torch.Tensor | None  # None: FlashAttention plans in every layer


@dataclass
class VerifyPart:
    """The requests at the front of the batch, which verify drafts."""

    num_rows: int
    max_rows: int  # of one request
    uniform: bool  # so many rows has every request, but for those that only fill the batch up
    block_table: torch.Tensor  # [B, pages]
    prefix_lens: torch.Tensor  # [B] int32
    query_start: torch.Tensor  # [B + 1] int32
    plan: torch.Tensor | None = None  # for our attention, where a layer of the group needs it
    prefix: PrefixSchedule | None = None  # for FlashAttention over the prefix, likewise
    refresh: RefreshStep | None = None


@dataclass
class NworFlashMetadata(FlashAttentionMetadata):
    """vLLM's metadata of the whole batch, and its two parts."""

    verify: VerifyPart | None = None
    rest: FlashAttentionMetadata | None = None  # of the requests behind, None: there are none


class NworFlashBackend(FlashAttentionBackend):
    """Stands aside where there is nothing to stage: then it is FlashAttention under our name."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return choose_impl(NworFlashImpl)

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return NworFlashMetadataBuilder

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


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
        self._plans: dict[tuple[int, int, int, bool], torch.Tensor] = {}
        codes = holds_codes(vllm_config.cache_config.cache_dtype)
        self._prefix_dtype = torch.float8_e4m3fn if codes else self.kv_cache_dtype
        # Where graphs find the schedule of prefixes; vLLM's own is that of the requests behind.
        self._schedules = self.aot_schedule
        self._schedule = (
            torch.zeros_like(self.scheduler_metadata)
            if self.use_full_cuda_graph and self.aot_schedule
            else None
        )
        self._scheduled = 0  # words of it in use
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._find_window(vllm_config)

    def _find_window(self, vllm_config: Any) -> None:
        """What vLLM's builder finds at its first build, if that schedules; ours need not."""
        layers = vllm_config.compilation_config.static_forward_context.values()
        impls = [getattr(layer, "impl", None) for layer in layers]
        windows = {i.sliding_window for i in impls if isinstance(i, FlashAttentionImpl)}
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
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
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
        lens = rows.query_lens(common.query_start_loc_cpu, common.num_reqs)
        drafts = [max(0, n - 1) for n in lens] if capture else self._engine.drafts(lens, common)
        real = rows.without_padding(lens)
        uniform = lens[0] if lens and lens[0] in self._uniform_rows else self._uniform_rows[0]
        count = rows.verify_requests(lens, drafts, uniform)
        self._engine.begin(
            self._group,
            lens[:real],
            drafts[:real],
            common.slot_mapping,
            capture,
            may_defer=count >= real,  # requests behind read their rows from the cache
        )
        if not capture:
            table = common.block_table_tensor[:real]
            self._engine.seen = StepSeen(lens[:real], drafts[:real], table)
        if count == 0:
            return super().build(0, common)
        metadata = super().build(0, common, fast_build=True)
        rest = None
        num_rows = common.num_actual_tokens
        if count < real:
            num_rows = sum(lens[:count])
            rest = super().build(0, self._behind(common, count, num_rows, max(lens[count:])))
        verify = self._verify_part(common, lens[:count], num_rows)
        if self._engine.refresh is not None:
            verify.refresh = self._engine.refresh.step(
                self._own, lens[:count], drafts[:count], common, verify.prefix_lens, capture=capture
            )
        if self._plans_ours:
            self._plan(verify)
        if self._plans_flash:
            verify.prefix = self._prefix_schedule(common, verify)
        return NworFlashMetadata(**vars(metadata), verify=verify, rest=rest)

    def _behind(
        self, common: CommonAttentionMetadata, count: int, num_rows: int, max_query_len: int
    ) -> CommonAttentionMetadata:
        """The requests after the first `count`, whose rows begin at `num_rows`."""
        return common.replace(
            query_start_loc=common.query_start_loc[count:] - num_rows,
            query_start_loc_cpu=common.query_start_loc_cpu[count:] - num_rows,
            seq_lens=common.seq_lens[count:],
            num_reqs=common.num_reqs - count,
            num_actual_tokens=common.num_actual_tokens - num_rows,
            max_query_len=max_query_len,
            block_table_tensor=common.block_table_tensor[count:],
            slot_mapping=common.slot_mapping[num_rows:],
        )

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
        uniform = all(length in (0, max_rows) for length in lens)
        block_table = common.block_table_tensor[:count]
        return VerifyPart(num_rows, max_rows, uniform, block_table, prefix, start)

    def _prefix_schedule(self, common: CommonAttentionMetadata, part: VerifyPart) -> PrefixSchedule:
        """As vLLM's builder makes one, for prefixes alone, which every row sees in whole."""
        in_graph = self.use_full_cuda_graph and part.num_rows <= (self.max_cudagraph_size or 0)
        splits = self.max_num_splits if in_graph else 0
        if envs.VLLM_BATCH_INVARIANT:
            return PrefixSchedule(common.max_seq_len, 1, None)
        if not self._schedules:
            return PrefixSchedule(common.max_seq_len, splits, None)
        count = part.prefix_lens.shape[0]
        made = get_scheduler_metadata(
            batch_size=count,
            max_seqlen_q=part.max_rows,
            max_seqlen_k=common.max_seq_len,
            num_heads_q=self.num_heads_q,
            num_heads_kv=self.num_heads_kv,
            headdim=self.headdim,
            cache_seqlens=part.prefix_lens,
            qkv_dtype=self._prefix_dtype,
            cu_seqlens_q=part.query_start,
            page_size=self.block_size,
            causal=False,
            num_splits=splits,
            sm_margin=self._sm_margin(common, part, splits),
        )
        if self._schedule is not None:
            size = made.shape[0]
            self._schedule[:size] = made
            if size < self._scheduled:  # nothing of a larger batch may stand behind
                self._schedule[size : self._scheduled] = 0
            self._scheduled, made = size, self._schedule[:size]
        return PrefixSchedule(common.max_seq_len, splits, made)

    def _sm_margin(self, common: CommonAttentionMetadata, part: VerifyPart, splits: int) -> int:
        """SMs that FlashAttention-3 is to leave alone; below 0: it is told of more than there are.

        Without a number of splits that planner and kernel share, the planner's own way is taken.
        """
        lens = common.seq_lens_cpu_upper_bound
        packed = part.max_rows * (self.num_heads_q // self.num_heads_kv)
        if splits == 0 or lens is None or packed > prefix_schedule.MAX_ROWS:
            return 0
        count = part.prefix_lens.shape[0]
        tokens = max(0, int(lens[:count].sum()) - part.num_rows)
        sizes = (count, part.num_rows, self.num_heads_kv, self._num_sms, splits)
        return self._num_sms - prefix_schedule.pretended_sms(tokens, *sizes)

    def _plan(self, part: VerifyPart) -> None:
        """Plans the step's work once for all layers, in the buffer of its shape."""
        key_cache, _ = cache_views(self._layer.kv_cache, compat.CACHE_LAYOUT)
        impl = self._layer.impl
        # Planning looks at sizes only.
        query = key_cache.new_empty(1, 1, impl.head_size)
        query = query.expand(part.num_rows, impl.num_heads, impl.head_size)
        shape = (part.prefix_lens.shape[0], part.num_rows, part.max_rows, part.refresh is not None)
        self._plans[shape] = part.plan = verify_plan(
            query,
            key_cache,
            part.block_table,
            part.prefix_lens,
            part.query_start,
            view=part.refresh.view(self._own[0]) if part.refresh is not None else None,
            window=impl.window,
            max_rows=part.max_rows,
            plan=self._plans.get(shape),
        )


class NworFlashImpl(TargetLayer, FlashAttentionImpl):
    """One layer of the target model."""

    stock = FlashAttentionImpl

    @classmethod
    def takes_codes(cls, arguments: Mapping[str, Any]) -> bool:
        settings = engine_of(get_current_vllm_config()).settings
        return (
            arguments["kv_cache_dtype"] in FLOAT8
            and arguments["sliding_window"] is None
            and get_flash_attn_version(head_size=arguments["head_size"]) == 3
            and settings.attention_route in FLASH_ROUTES
            and not settings.enable_specpv
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._route = self.engine.settings.attention_route
        self._codes = holds_codes(self.kv_cache_dtype)
        self.window = self.sliding_window[0] + 1 if self.sliding_window[0] >= 0 else 0
        self.flash_prefix = (
            self._route in FLASH_ROUTES
            and self.vllm_flash_attn_version == 3
            and self.window == 0
            and self.engine.refresh is None  # its views are read by our attention only
        )

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        name = layer.layer_name
        if not self.engine.write(name, key, value, slot_mapping, defer=self.flash_prefix):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if isinstance(attn_metadata, PartialPass):
            return attn_metadata.attend(self, layer, query, key, value, kv_cache, output)
        part = attn_metadata.verify if isinstance(attn_metadata, NworFlashMetadata) else None
        if part is None:
            scales = (output_scale, output_block_scale)
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, *scales
            )
        if output_scale is not None or output_block_scale is not None:
            raise NworError(f"layer {layer.layer_name}: got a quantised output, expected none")
        name, n = layer.layer_name, part.num_rows
        if self.flash_prefix:
            self._merge_rows(layer, query[:n], key[:n], value[:n], kv_cache, part, output[:n])
        else:
            self._attend(name, query[:n], key[:n], value[:n], kv_cache, part, output[:n])
        if attn_metadata.rest is not None:
            behind = (tensor[n:] for tensor in (query, key, value))
            super().forward(layer, *behind, kv_cache, attn_metadata.rest, output[n:])
        return output

    def _attend(
        self,
        name: str,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        part: VerifyPart,
        output: torch.Tensor,
    ) -> None:
        """Our attention for all of it."""
        caches = cache_views(kv_cache, compat.CACHE_LAYOUT)
        refresh, plan = part.refresh, part.plan

        def attend(view: PartialView | None, out: torch.Tensor | None = None) -> torch.Tensor:
            return verify_attention(
                query,
                key,
                value,
                *caches,
                part.block_table,
                part.prefix_lens,
                part.query_start,
                None,
                self.scale,
                view=view,
                window=self.window,
                softcap=self.logits_soft_cap,
                out=out,
                max_rows=part.max_rows,
                plan=plan if out is not None else None,  # made for the step's own views
                route=self._route,
            )

        attend(None if refresh is None else refresh.view(name), output)
        if refresh is not None:
            refresh.after(name, attend, query, output)

    def _merge_rows(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        part: VerifyPart,
        output: torch.Tensor,
    ) -> None:
        """FlashAttention-3 over the prefix, then the rows in flight and the layer's write.

        Queries of a quantised cache are quantised, too; K and V of the rows in flight are not yet.
        """
        prefix, plain_query, descale = part.prefix, query, {}
        assert prefix is not None
        if self._codes:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
            shape = (part.prefix_lens.shape[0], self.num_kv_heads)
            descale = {"k_descale": layer._k_scale.expand(shape)}
            descale["v_descale"] = layer._v_scale.expand(shape)
            if query.dtype != output.dtype:
                descale["q_descale"] = layer._q_scale.expand(shape)
                plain_query = query.to(output.dtype).mul_(layer._q_scale)
        key_cache, value_cache = cache_views(kv_cache, compat.CACHE_LAYOUT)
        _, lse = flash_attn_varlen_func(
            q=query,
            k=canonicalize_singleton_dim_strides(key_cache),
            v=canonicalize_singleton_dim_strides(value_cache),
            out=output,
            cu_seqlens_q=part.query_start,
            max_seqlen_q=part.max_rows,
            seqused_k=part.prefix_lens,
            max_seqlen_k=prefix.max_prefix,
            softmax_scale=self.scale,
            causal=False,
            block_table=part.block_table,
            softcap=self.logits_soft_cap,
            return_softmax_lse=True,
            scheduler_metadata=prefix.metadata,
            num_splits=prefix.max_splits,
            fa_version=self.vllm_flash_attn_version,
            **descale,
        )
        _C.merge_rows_of_layer(
            self.engine.interceptor,
            layer.layer_name,
            plain_query,
            key,
            value,
            output,
            lse.transpose(0, 1),
            part.query_start,
            self.scale,
            output,
            softcap=self.logits_soft_cap,
            rows_per_request=part.max_rows if part.uniform else 0,
        )
