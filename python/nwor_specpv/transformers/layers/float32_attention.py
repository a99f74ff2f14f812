"""Verify attention in float32 on CUDA, by torch over gathered K/V.

The CUDA kernels take float16 and bfloat16 only. Shapes alone decide what is launched and nothing
waits for the device, so a graph can capture it.
"""

from __future__ import annotations

import torch

from nwor_specpv import CompactView, PartialView


def float32_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    query_start: torch.Tensor,
    tree_mask: torch.Tensor | None,
    scale: float,
    *,
    positions: torch.Tensor,
    max_rows: int,
    view: PartialView | CompactView | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """The same as `verify_attention`; `positions` [T] are the rows'. Caches are contiguous."""
    num_rows, heads, dim = query.shape
    kv_heads = key.shape[1]
    at, is_row = _rows(query_start, max_rows, num_rows)
    in_prefix, seen = _prefix(block_table, prefix_lens, key_cache, view)
    asking = query[at].unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)  # [B, H, G, R, D]
    head = torch.arange(kv_heads, device=query.device)[None, :, None]
    flat = [side.flatten(0, 1) for side in (key_cache, value_cache)]
    copies = [[view.keys], [view.values]] if isinstance(view, CompactView) else [[], []]
    keys, values = (
        torch.cat([cached[in_prefix, head], *copy, rows[at].transpose(1, 2)], 2)
        for cached, copy, rows in zip(flat, copies, (key, value), strict=True)
    )  # [B, H, N + R, D]
    scores = asking @ keys[:, :, None].transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    among = _among_rows(tree_mask, at, max_rows) & is_row[:, None, :]
    before = seen[:, None, :].expand(-1, max_rows, -1)
    if window:
        of_row = positions[at]
        token = torch.arange(seen.shape[1], device=query.device)
        before = before & (token > of_row[..., None] - window)
        among = among & (of_row[:, None, :] > of_row[..., None] - window)
    visible = torch.cat([before, among], 2)[:, None, None]  # [B, 1, 1, R, N + R]
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    # Unseen values may be NaN, which a weight of zero does not remove.
    by_some = (visible & is_row[:, None, None, :, None]).any(3)
    values = values.masked_fill(~by_some[:, :, 0, :, None], 0)
    out = scores.softmax(-1) @ values[:, :, None]
    out = out.permute(0, 3, 1, 2, 4).reshape(len(at), max_rows, heads, dim)
    request = torch.searchsorted(
        query_start, torch.arange(num_rows, device=query.device, dtype=torch.int32), right=True
    ).clamp(max=len(at))
    own = torch.arange(num_rows, device=query.device) - query_start[request - 1]
    return out[request - 1, own.clamp(max=max_rows - 1)]


def _rows(
    query_start: torch.Tensor, max_rows: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, R] rows of each request, and which of them exist."""
    step = torch.arange(max_rows, device=query_start.device)
    at = query_start[:-1, None] + step
    return at.clamp(max=num_rows - 1), at < query_start[1:, None]


def _prefix(
    block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    cache: torch.Tensor,
    view: PartialView | CompactView | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of the tokens before the rows [B, 1 or H, N], and which of them are seen [B, N].

    The tokens of a compact view come after those in slots.
    """
    most = cache.shape[0] * cache.shape[1] - 1
    slots = _spread(block_table, cache.shape[1]).clamp(0, most)[:, None]
    seen = torch.arange(slots.shape[2], device=slots.device) < prefix_lens[:, None]
    if view is None:
        return slots, seen
    if isinstance(view, CompactView):
        partial = view.lens[:, None] >= 0
        among = torch.arange(view.keys.shape[2], device=slots.device) < view.lens[:, None]
        return slots, torch.cat([seen & ~partial, among], 1)
    chosen = _spread(view.blocks, view.block_size).clamp(0, most)
    partial = view.num_blocks[:, None] >= 0
    among = torch.arange(chosen.shape[2], device=slots.device) < view.view_lens[:, None]
    both = torch.cat([slots.expand(-1, chosen.shape[1], -1), chosen], 2)
    return both, torch.cat([seen & ~partial, among & partial], 1)


def _spread(pages: torch.Tensor, size: int) -> torch.Tensor:
    """Slots of whole pages, [.., pages * size]."""
    within = torch.arange(size, device=pages.device)
    return (pages[..., None].long() * size + within).flatten(-2)


def _among_rows(tree_mask: torch.Tensor | None, at: torch.Tensor, max_rows: int) -> torch.Tensor:
    """[B, R, R]: whether a row sees another of its request."""
    other = torch.arange(max_rows, device=at.device)
    if tree_mask is None:
        return (other[None, :] <= other[:, None]).expand(len(at), -1, -1)
    words = tree_mask[at][..., other // 64]  # [B, R, R]
    return (words >> (other % 64)) & 1 > 0
