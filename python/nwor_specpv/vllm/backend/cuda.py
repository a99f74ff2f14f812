"""vLLM's FlashAttention backend with our write, and our attention for the rows that verify drafts.

Users choose it with `--attention-backend CUSTOM`. Requests that verify drafts stand first in a
batch (vLLM orders it so). Their rows in flight are never read from the cache: FlashAttention-3
attends to what is committed, and one kernel of ours adds the rows and does the layer's write beside
it, so that a layer has as many launches as in vLLM. Where that does not serve (another
FlashAttention, a sliding window, another `attention_route`) our own attention does all of it.
Requests behind them, and steps without drafts, go to FlashAttention as ever.
"""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from .flash_builder import NworFlashMetadataBuilder
from .flash_head import HeadFlashImpl, TreeHeadFlashImpl
from .flash_layer import NworFlashImpl
from .layer import choose_impl


class NworFlashBackend(FlashAttentionBackend):
    """Stands aside where there is nothing to stage: then it is FlashAttention under our name."""

    # From vLLM 0.33 on a fused op would write K/V, drafts included, and never call our write.
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod  # vLLM's is static and is called the same way
    def get_impl_cls(cls) -> type[FlashAttentionImpl]:
        heads = {"refresh": HeadFlashImpl, "trees": TreeHeadFlashImpl}
        return choose_impl(NworFlashImpl, cls, NworFlashMetadataBuilder, heads)

    @staticmethod
    def get_builder_cls() -> type[FlashAttentionMetadataBuilder]:
        return NworFlashMetadataBuilder
