"""Peers of verify attention on a CUDA device: name -> call(bench, set), or why it is missing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from attention_inputs import DEVICE, PAGE, Bench, Set
from attention_torch_peers import flash_attention_2, flex, sdpa


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
    if bench.case.cache != bench.case.dtype or bench.case.view:
        raise NotImplementedError("pages of the rows' dtype only")
    return {
        "q": s.query,
        "k": bench.pool.keys,
        "v": bench.pool.values,
        "out": s.out,
        "cu_seqlens_q": bench.starts,
        "max_seqlen_q": bench.case.rows,
        "seqused_k": bench.all_lens,
        "max_seqlen_k": max(bench.case.lens) + bench.case.rows,
        "softmax_scale": bench.case.head_dim**-0.5,
        "causal": True,
        "block_table": s.table,
    }


def flash_attention_3() -> Callable[[Bench, Set], torch.Tensor]:
    """As vLLM calls it: planned once for all layers of a step, so never inside a graph here."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    plans: dict[Bench, torch.Tensor] = {}

    def plan(bench: Bench) -> torch.Tensor:
        case = bench.case
        return get_scheduler_metadata(
            batch_size=len(case.lens),
            max_seqlen_q=case.rows,
            max_seqlen_k=max(case.lens) + case.rows,
            num_heads_q=case.heads,
            num_heads_kv=case.kv_heads,
            headdim=case.head_dim,
            cache_seqlens=bench.all_lens,
            qkv_dtype=bench.pool.keys.dtype,
            cu_seqlens_q=bench.starts,
            page_size=PAGE,
            causal=True,
        )

    def run(bench: Bench, s: Set) -> torch.Tensor:
        arguments = paged_arguments(bench, s)
        if bench not in plans:
            plans.clear()  # of another case
            plans[bench] = plan(bench)
        flash_attn_varlen_func(**arguments, fa_version=3, scheduler_metadata=plans[bench])
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
        batch, length, head_dim = len(case.lens), case.lens[0], case.head_dim
        shape = (batch, length, case.kv_heads, head_dim)
        if contiguous.get("shape") != shape:
            contiguous.clear()
            contiguous["shape"] = shape
            sets = min(len(bench.sets), 4)
            contiguous["kv"] = [
                tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
                for _ in range(sets)
            ]
        keys, values = contiguous["kv"][bench.sets.index(s) % len(contiguous["kv"])]
        group = case.heads // case.kv_heads
        folded = (
            s.query.view(batch, case.rows, case.kv_heads, group, head_dim)
            .transpose(2, 3)
            .reshape(batch, case.rows * group, case.kv_heads, head_dim)
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
            scale=head_dim**-0.5,
        )

    return run


def flash_infer(tree: bool) -> Callable[[Bench, Set], torch.Tensor]:
    """FlashInfer's paged prefill, planned when a set is first seen: never inside a graph.

    Its kernels for Hopper do not split a prefix, so that a few rows leave most of the device idle;
    those named fa2 do, and take a mask. Wrappers are not made for graphs of their own (those pad
    their grids): a graph here replays the lengths it was planned for.
    """
    import flashinfer

    wrappers: dict[Set, Any] = {}
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)

    def plan(bench: Bench, s: Set) -> Any:
        case = bench.case
        lens = [n + case.rows for n in case.lens]
        counts = [math.ceil(n / PAGE) for n in lens]
        starts = [case.rows * b for b in range(len(lens) + 1)]
        ends = list(itertools.accumulate(counts, initial=0))
        pages = torch.cat([s.table[b, :count] for b, count in enumerate(counts)])
        mask = None
        if tree:
            j = torch.arange(case.rows, device=DEVICE)
            seen = (bench.tree[:, j // 64] >> (j % 64) & 1).bool().split(case.rows)
            ones = [rows.new_ones(case.rows, n) for rows, n in zip(seen, case.lens, strict=True)]
            both = zip(ones, seen, strict=True)
            mask = torch.cat([torch.cat(parts, 1).flatten() for parts in both])

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=DEVICE)

        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        wrapper.plan(
            ints(starts),
            ints(ends),
            pages,
            ints([(n - 1) % PAGE + 1 for n in lens]),
            case.heads,
            case.kv_heads,
            case.head_dim,
            PAGE,
            custom_mask=mask,
            causal=not tree,
            sm_scale=case.head_dim**-0.5,
            q_data_type=torch.bfloat16,
        )
        return wrapper

    def run(bench: Bench, s: Set) -> torch.Tensor:
        if bench.case.cache != "bfloat16" or bench.case.view:
            raise NotImplementedError("bfloat16 pages only")
        if s not in wrappers:
            if wrappers.keys() - set(bench.sets):  # of another case
                wrappers.clear()
            wrappers[s] = plan(bench, s)
        return wrappers[s].run(s.query, (bench.pool.keys, bench.pool.values), out=s.out)

    return run


def flash_infer_chain() -> Callable[[Bench, Set], torch.Tensor]:
    return flash_infer(tree=False)


def flash_infer_tree() -> Callable[[Bench, Set], torch.Tensor]:
    return flash_infer(tree=True)


PEERS: dict[str, tuple[Callable[[], Callable[[Bench, Set], object]], str | None]] = {
    # name: (maker, which of ours its output is comparable with)
    "read": (read_floor, None),
    "FA3": (flash_attention_3, "chain"),
    "FA2 folded": (flash_attention_2_folded, None),
    "vLLM Triton": (vllm_triton, "chain"),
    "FlashInfer": (flash_infer_chain, "chain"),
    "FlashInfer tree": (flash_infer_tree, "tree"),
    "FA2": (flash_attention_2, "chain"),
    "SDPA tree": (sdpa, "tree"),
    "flex tree": (flex, "tree"),
}


def find_peers(
    names: Iterable[str] = tuple(PEERS),
) -> tuple[dict[str, Callable[[Bench, Set], object]], dict[str, str]]:
    """Those of these names that are there, and why others are not."""
    found, missing = {}, {}
    for name in names:
        maker, _ = PEERS[name]
        try:
            found[name] = maker()
        except Exception as error:  # whatever keeps a peer from loading is the answer
            missing[name] = f"{type(error).__name__}: {error}"
    return found, missing
