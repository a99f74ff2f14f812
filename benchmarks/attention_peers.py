"""Peers of verify attention on a CUDA device: name -> call(bench, set), or why it is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from attention_inputs import DEVICE, HEAD_DIM, HEADS, KV_HEADS, Bench, Set


def read_floor() -> Callable[[Bench, Set], object]:
    """A kernel that reads the prefix pages and nothing else."""
    import triton
    import triton.language as tl

    @triton.jit
    def read_pages(keys, values, pages, sink, size: tl.constexpr):
        page = tl.load(pages + tl.program_id(0)).to(tl.int64)
        at = page * size + tl.arange(0, size)
        k = tl.load(keys + at, eviction_policy="evict_first")
        v = tl.load(values + at, eviction_policy="evict_first")
        total = tl.sum(k ^ v, 0)
        tl.store(sink, total, mask=total == 0x12345678)

    sink = torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def run(bench: Bench, s: Set) -> None:
        keys = bench.pool.keys.view(torch.uint8).view(torch.int32)
        values = bench.pool.values.view(torch.uint8).view(torch.int32)
        size = keys[0].numel()
        read_pages[(s.pages.numel(),)](keys, values, s.pages, sink, size=size, num_warps=8)

    return run


def paged_arguments(bench: Bench, s: Set) -> dict[str, Any]:
    """What vLLM's paged kernels take, by the names they share."""
    if bench.case.cache != "bfloat16" or bench.case.view:
        raise NotImplementedError("bfloat16 pages only")
    return {
        "q": s.query,
        "k": bench.pool.keys,
        "v": bench.pool.values,
        "out": s.out,
        "cu_seqlens_q": bench.starts,
        "max_seqlen_q": bench.case.rows,
        "seqused_k": bench.all_lens,
        "max_seqlen_k": max(bench.case.lens) + bench.case.rows,
        "softmax_scale": HEAD_DIM**-0.5,
        "causal": True,
        "block_table": s.table,
    }


def flash_attention_3() -> Callable[[Bench, Set], torch.Tensor]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    def run(bench: Bench, s: Set) -> torch.Tensor:
        flash_attn_varlen_func(**paged_arguments(bench, s), fa_version=3)
        return s.out

    return run


def vllm_triton() -> Callable[[Bench, Set], torch.Tensor]:
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError:
        from vllm.attention.ops.triton_unified_attention import unified_attention

    def run(bench: Bench, s: Set) -> torch.Tensor:
        unified_attention(
            **paged_arguments(bench, s),
            window_size=(-1, -1),
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )
        return s.out

    return run


def flash_attention_2_folded() -> Callable[[Bench, Set], object]:
    """LibTorch's kernel over contiguous prefixes it gets for free, rows folded into the group.

    The prefix only: the in-flight rows are left out, to its advantage.
    """
    contiguous: dict[str, object] = {}

    def run(bench: Bench, s: Set) -> None:
        case = bench.case
        if case.cache != "bfloat16" or case.view or len(set(case.lens)) > 1:
            raise NotImplementedError("uniform bfloat16 batches only")
        batch, length = len(case.lens), case.lens[0]
        shape = (batch, length, KV_HEADS, HEAD_DIM)
        if contiguous.get("shape") != shape:
            contiguous.clear()
            contiguous["shape"] = shape
            sets = min(len(bench.sets), 4)
            contiguous["kv"] = [
                tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
                for _ in range(sets)
            ]
        keys, values = contiguous["kv"][bench.sets.index(s) % len(contiguous["kv"])]
        group = HEADS // KV_HEADS
        folded = (
            s.query.view(batch, case.rows, KV_HEADS, group, HEAD_DIM)
            .transpose(2, 3)
            .reshape(batch, case.rows * group, KV_HEADS, HEAD_DIM)
        )
        torch.ops.aten._flash_attention_forward(
            folded,
            keys,
            values,
            None,
            None,
            case.rows * group,
            length,
            0.0,
            False,
            False,
            scale=HEAD_DIM**-0.5,
        )

    return run


PEERS: dict[str, tuple[Callable[[], Callable[[Bench, Set], object]], bool]] = {
    # name: (maker, whether its output is comparable with our chain)
    "read": (read_floor, False),
    "FA3": (flash_attention_3, True),
    "FA2 folded": (flash_attention_2_folded, False),
    "vLLM Triton": (vllm_triton, True),
}


def find_peers() -> tuple[dict[str, Callable[[Bench, Set], object]], dict[str, str]]:
    found, missing = {}, {}
    for name, (maker, _) in PEERS.items():
        try:
            found[name] = maker()
        except Exception as error:  # whatever keeps a peer from loading is the answer
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing
