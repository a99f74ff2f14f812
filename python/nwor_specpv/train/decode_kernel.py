"""Attention of one new token per row over a contiguous cache, in Triton.

A row reads from where its text begins, and each key once for all query heads of its group. Training
uses it on CUDA where Triton is installed, and torch's attention otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from nwor_specpv.errors import NworError

_ROWS = 16  # heads of a group: the fewest rows of a product


@triton.jit(do_not_specialize=["position"])
def _decode_kernel(
    query,  # [B, Hkv, GROUPS, DIM]
    keys,  # [B, Hkv, L, DIM], rows of L * DIM apart
    values,
    starts,  # [B]
    out,  # as query
    position,
    scale,
    batch_stride,
    head_stride,
    HEADS: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    DIM: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    batch = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(starts + batch).to(tl.int32)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    column = tl.arange(0, BLOCK)
    own = (batch * HEADS + head) * GROUPS * DIM + row[:, None] * DIM + dim[None, :]
    there = row[:, None] < GROUPS
    q = tl.load(query + own, mask=there, other=0.0)
    base = batch.to(tl.int64) * batch_stride + head * head_stride
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    # The first block contains `begin`, so its maximum is finite.
    first = begin // BLOCK * BLOCK
    for at in range(first, position + 1, BLOCK):
        place = at + column
        seen = (place >= begin) & (place <= position)
        offset = base + place[:, None] * DIM + dim[None, :]
        k = tl.load(keys + offset, mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shares = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        v = tl.load(values + offset, mask=seen[:, None], other=0.0)
        total = total * fade + tl.sum(shares, 1)
        sums = sums * fade[:, None] + tl.dot(shares.to(v.dtype), v)
        top = higher
    result = (sums / total[:, None]).to(q.dtype)
    tl.store(out + own, result, mask=there)


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    start: torch.Tensor,
) -> torch.Tensor:
    """query [B, Hkv, groups, D] over keys and values [B, Hkv, L, D] at start .. position."""
    batch, heads, groups, dim = query.shape
    if groups > _ROWS:  # the kernel would not write the others
        raise NworError(f"query: got {groups} heads of a group, expected at most {_ROWS}")
    out = torch.empty_like(query)
    _decode_kernel[(batch, heads)](
        query,
        keys,
        values,
        start,
        out,
        position,
        dim**-0.5,
        keys.stride(0),
        keys.stride(1),
        HEADS=heads,
        GROUPS=groups,
        DIM=dim,
        ROWS=_ROWS,
        BLOCK=64,
        num_warps=4,
    )
    return out
