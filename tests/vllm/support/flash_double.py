"""FlashAttention-3 in plain torch, so that vLLM's FlashAttention backend, and ours, run on a CPU.

The calls are bound to the signatures of vLLM's own functions: an argument those do not have, or a
tensor of another shape than they want, fails here as it would on a GPU. What it computes is exact
attention in float32; what it cannot show are kernels, graphs and streams.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
NUM_SMS = 132


@dataclass
class Calls:
    """What was asked of FlashAttention since the double was put in."""

    attended: list[dict[str, Any]] = field(default_factory=list)
    planned: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def flash_attention(backend: str) -> Iterator[Calls]:
    """The engines started within use `backend` over the double, in place of CPU_ATTN."""
    import vllm.v1.attention.backends.fa_utils as fa_utils
    import vllm.v1.attention.backends.flash_attn as flash

    from nwor_specpv.vllm import plugin

    calls, real = Calls(), _interface()

    def attend(**arguments: Any) -> Any:
        bound = inspect.signature(real.flash_attn_varlen_func).bind(**arguments)
        bound.apply_defaults()
        calls.attended.append(_kept(arguments))
        return _attend(SimpleNamespace(**bound.arguments))

    def plan(**arguments: Any) -> torch.Tensor:
        bound = inspect.signature(real.get_scheduler_metadata).bind(**arguments)
        bound.apply_defaults()
        given = SimpleNamespace(**bound.arguments)
        assert given.cache_seqlens.shape == (given.batch_size,)
        assert given.cache_seqlens.dtype == torch.int32
        assert given.cu_seqlens_q.shape == (given.batch_size + 1,)
        calls.planned.append(_kept(arguments))
        return torch.ones(1 + 4 * math.ceil(given.batch_size / 4) * 4, dtype=torch.int32)

    names = {
        "flash_attn_varlen_func": attend,
        "get_scheduler_metadata": plan,
        "reshape_and_cache_flash": _write,
        "flash_attn_supports_sinks": lambda: True,
        "get_flash_attn_version": lambda *_, **__: 3,
        "flash_attn_supports_kv_cache_dtype": lambda *_, **__: True,
    }
    device = SimpleNamespace(multi_processor_count=NUM_SMS)
    try:
        with (
            mock.patch.multiple(flash, create=True, **names),
            mock.patch.multiple(fa_utils, create=True, **names),
            mock.patch.object(torch.cuda, "get_device_properties", return_value=device),
            _names_of_ours(names),
            mock.patch.object(plugin, "CPU_BACKEND", backend),
        ):
            _choose_anew()
            yield calls
    finally:
        _choose_anew()


def _kept(arguments: dict[str, Any]) -> dict[str, Any]:
    """As they are now: lengths and starts lie in buffers that the next step fills."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and value.dim() == 1 else value
        for name, value in arguments.items()
    }


def _choose_anew() -> None:
    """Registers the backend that stands in for CPU_ATTN now; vLLM remembers the one before."""
    from vllm.v1.attention import selector

    from nwor_specpv.vllm import plugin

    plugin.register()
    selector._cached_get_attn_backend.cache_clear()


@contextmanager
def _names_of_ours(names: dict[str, Any]) -> Iterator[None]:
    """The same for our modules, which import them by name, possibly before."""
    from nwor_specpv.vllm.backend import flash_layer, prefix_planner

    with ExitStack() as stack:
        for ours in (flash_layer, prefix_planner):
            known = {name: value for name, value in names.items() if hasattr(ours, name)}
            stack.enter_context(mock.patch.multiple(ours, **known))
        yield


def _interface() -> Any:
    """vLLM's own functions, for their signatures: its package is importable only with a GPU."""
    import vllm

    path = Path(vllm.__file__).parent / "vllm_flash_attn" / "flash_attn_interface.py"
    spec = importlib.util.spec_from_file_location("vllm.vllm_flash_attn.flash_attn_interface", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    _dtype: str,
    key_scale: torch.Tensor,
    value_scale: torch.Tensor,
) -> None:
    """Caches [P, S, H, D]; slot -1 is nowhere. Bytes hold float8 codes of what is scaled."""
    size = key_cache.shape[1]
    for rows, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        if cache.dtype == torch.uint8:
            cache, rows = cache.view(torch.float8_e4m3fn), rows / scale
        for row, slot in enumerate(slots.tolist()):
            if slot >= 0:
                cache[slot // size, slot % size] = rows[row].to(cache.dtype)


def _attend(given: SimpleNamespace) -> Any:
    """Request by request: gather the pages, mask, softmax. Rows stand at the end of the keys."""
    starts, lens = given.cu_seqlens_q.tolist(), given.seqused_k.tolist()
    assert len(starts) == len(lens) + 1 == given.block_table.shape[0] + 1
    assert given.max_seqlen_k >= max(lens)
    assert given.max_seqlen_q >= max(b - a for a, b in itertools.pairwise(starts))
    assert given.out.shape == given.q.shape == (starts[-1], *given.q.shape[1:])
    heads, kv_heads = given.q.shape[1], given.k.shape[2]
    group = heads // kv_heads
    scale = given.softmax_scale or given.q.shape[2] ** -0.5

    def scaled(tensor: torch.Tensor, descale: torch.Tensor | None, request: int) -> torch.Tensor:
        """[T, H, D] in float32, codes by the scales of their request and KV head."""
        if descale is None or tensor.dtype != torch.float8_e4m3fn:
            return tensor.float()
        assert descale.shape == (len(lens), kv_heads)
        each = descale[request].repeat_interleave(tensor.shape[1] // kv_heads)
        return tensor.float() * each[:, None]

    lse = torch.full((heads, starts[-1]), -math.inf)
    left, right = given.window_size or (-1, -1)
    for b, length in enumerate(lens):
        rows = slice(starts[b], starts[b + 1])
        count = rows.stop - rows.start
        if count == 0:
            continue
        pages = given.block_table[b, : math.ceil(length / given.k.shape[1])].long()
        keys, values = (
            scaled(cache[pages].flatten(0, 1)[:length], descale, b).repeat_interleave(group, 1)
            for cache, descale in ((given.k, given.k_descale), (given.v, given.v_descale))
        )
        query = scaled(given.q[rows], given.q_descale, b)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
        if given.softcap:
            scores = given.softcap * torch.tanh(scores / given.softcap)
        behind = torch.arange(length - count, length)[:, None] - torch.arange(length)[None]
        hidden = torch.zeros_like(behind, dtype=torch.bool)
        if given.causal or right >= 0:
            hidden |= behind < -max(0, right)
        if left >= 0:
            hidden |= behind > left
        scores = scores.masked_fill(hidden, -math.inf)
        lse[:, rows] = scores.logsumexp(-1)
        weights = scores.softmax(-1).nan_to_num(0.0)  # no key at all: nothing
        given.out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(given.out.dtype)
    return (given.out, lse) if given.return_softmax_lse else given.out
