"""One layer of the target model on CUDA: its write, and attention of rows that verify drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionImpl,
    FlashAttentionMetadata,
    flash_attn_varlen_func,
    get_flash_attn_version,
)

from nwor_specpv import _C, PartialView, verify_attention
from nwor_specpv.errors import NworError
from nwor_specpv.vllm import versions
from nwor_specpv.vllm.engine import engine_of
from nwor_specpv.vllm.specpv.partial_pass import PartialPass
from nwor_specpv.vllm.support import FLOAT8, is_quantized

from .caches import key_value_of, plain_query, scaled_caches
from .flash_metadata import NworFlashMetadata, VerifyPart
from .layer import TargetLayer

# Values of `attention_route` that leave prefixes to FlashAttention-3.
FLASH_ROUTES = ("", "auto", "flash_attn_3")
# Head sizes that our own attention has kernels for on CUDA.
KERNEL_HEAD_SIZES = (64, 80, 96, 128, 192, 256)


class NworFlashImpl(TargetLayer, FlashAttentionImpl):
    """One layer of the target model."""

    stock = FlashAttentionImpl

    @classmethod
    def takes_quantized(cls, arguments: Mapping[str, Any]) -> bool:
        return (
            arguments["kv_cache_dtype"] in FLOAT8
            and arguments["sliding_window"] is None
            and get_flash_attn_version(head_size=arguments["head_size"]) == 3
            and engine_of(get_current_vllm_config()).settings.attention_route in FLASH_ROUTES
        )

    @classmethod
    def device_problem(cls, arguments: Mapping[str, Any]) -> str | None:
        size = arguments["head_size"]
        if size in KERNEL_HEAD_SIZES or not cls._needs_ours(arguments):
            return None
        has = ", ".join(map(str, KERNEL_HEAD_SIZES))
        return f"a head size of {size}, and our attention has {has}"

    @classmethod
    def _needs_ours(cls, arguments: Mapping[str, Any]) -> bool:
        """Whether our own attention will be asked for, be it now and then."""
        settings = engine_of(get_current_vllm_config()).settings
        return (
            arguments["sliding_window"] is not None
            or get_flash_attn_version(head_size=arguments["head_size"]) != 3
            or settings.attention_route not in FLASH_ROUTES
            or settings.enable_specpv
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._route = self.engine.settings.attention_route
        self._quantized = is_quantized(self.kv_cache_dtype)
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
        if not self.write(layer, key, value, slot_mapping, defer=self.flash_prefix):
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
            raise NworError(
                f"nwor_specpv: {layer.layer_name} has a quantised output; serve this model with "
                '"enable_nwor": false'
            )
        n = part.num_rows
        if self.flash_prefix:
            self._merge_rows(layer, query[:n], key[:n], value[:n], kv_cache, part, output[:n])
        else:
            self._attend(layer, query[:n], key[:n], value[:n], kv_cache, part, output[:n])
        if attn_metadata.rest is not None:
            behind = (tensor[n:] for tensor in (query, key, value))
            super().forward(layer, *behind, kv_cache, attn_metadata.rest, output[n:])
        return output

    def _attend(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        part: VerifyPart,
        output: torch.Tensor,
    ) -> None:
        """Our attention for all of it."""
        caches, scales = scaled_caches(layer, kv_cache)
        query = plain_query(layer, query, output.dtype)
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
                part.tree_mask,
                self.scale,
                view=view,
                window=self.window,
                softcap=self.logits_soft_cap,
                out=out,
                max_rows=part.max_rows,
                plan=plan if out is not None else None,  # made for the step's own views
                route=self._route,
                **scales,
            )

        name = layer.layer_name
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
        prefix, descale = part.prefix, {}
        assert prefix is not None
        if self._quantized:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
            shape = (part.prefix_lens.shape[0], self.num_kv_heads)
            descale = {"k_descale": layer._k_scale.expand(shape)}
            descale["v_descale"] = layer._v_scale.expand(shape)
            if query.dtype != output.dtype:
                descale["q_descale"] = layer._q_scale.expand(shape)
        key_cache, value_cache = key_value_of(kv_cache)
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
        _C.merge_and_write_rows(
            self.engine.interceptor,
            layer.layer_name,
            plain_query(layer, query, output.dtype),
            key,
            value,
            output,
            lse.transpose(0, 1),
            part.query_start,
            self.scale,
            output,
            softcap=self.logits_soft_cap,
            rows_per_request=part.max_rows if part.uniform and part.tree_mask is None else 0,
            tree_mask=part.tree_mask,
            overlaps=versions.adapter.flash_combine_waits,
        )
