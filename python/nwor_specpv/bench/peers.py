"""What our kernels are measured against, or the reason why it is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

VLLM_NAME = "vLLM reshape_and_cache_flash"
VLLM_FLASH_NAME = "FA3 varlen (vLLM)"


@dataclass(frozen=True)
class Peer:
    name: str
    call: Callable[..., None] | None
    missing: str = ""


def vllm_cache_write() -> Peer:
    """vLLM's reshape_and_cache_flash as call(key, value, key_cache, value_cache, slots)."""
    try:
        from vllm import _custom_ops  # noqa: F401  (registers the op)

        op = torch.ops._C_cache_ops.reshape_and_cache_flash
    except Exception as error:
        return Peer(VLLM_NAME, None, f"{type(error).__name__}: {error}")
    one = torch.ones(1, device="cuda")

    def write(key, value, key_cache, value_cache, slots) -> None:
        op(key, value, key_cache, value_cache, slots, "auto", one, one)

    return Peer(VLLM_NAME, write)


def vllm_flash_attention() -> Peer:
    """FlashAttention-3 over pages as vLLM calls it, for a bench.attention.Inputs; chains only.

    It reads the prefix's pages and nothing else, as if the rows' own K/V were among them.
    """
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported

        if not is_fa_version_supported(3):
            return Peer(VLLM_FLASH_NAME, None, "this device has no FlashAttention-3")
    except Exception as error:
        return Peer(VLLM_FLASH_NAME, None, f"{type(error).__name__}: {error}")

    def attend(inputs) -> None:
        flash_attn_varlen_func(
            q=inputs.query,
            k=inputs.key_cache,
            v=inputs.value_cache,
            out=inputs.out,
            cu_seqlens_q=inputs.starts,
            max_seqlen_q=inputs.case.rows,
            seqused_k=inputs.lens,
            max_seqlen_k=inputs.case.prefix,
            softmax_scale=inputs.scale,
            causal=True,
            block_table=inputs.table,
            fa_version=3,
        )

    return Peer(VLLM_FLASH_NAME, attend)
