"""What our kernels are measured against, or the reason why it is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

VLLM_NAME = "vLLM reshape_and_cache_flash"


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
