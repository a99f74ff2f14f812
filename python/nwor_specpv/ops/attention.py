"""Verify attention: chains and trees over paged, partial and in-flight K/V."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nwor_specpv import _C
from nwor_specpv.errors import NworError

from . import flash_packages
from ._call import call

__all__ = [
    "CompactView",
    "PartialView",
    "last_route",
    "merge_rows",
    "merge_states",
    "route_report",
    "verify_attention",
    "verify_plan",
]


@dataclass
class PartialView:
    """Blocks of `block_size` tokens inside the paged cache, per KV head and in token order.

    Block id = page * (page_size / block_size) + part. `view_lens[b]` tokens are seen; the last
    block may be partly filled. `num_blocks[b] = -1`: request b uses its whole prefix.
    """

    blocks: torch.Tensor  # [B, Hkv, max_blocks] int32
    num_blocks: torch.Tensor  # [B] int32
    view_lens: torch.Tensor  # [B] int32
    block_size: int


@dataclass
class CompactView:
    """A contiguous copy of the tokens to see. `lens[b] = -1`: request b uses its whole prefix."""

    keys: torch.Tensor  # [B, Hkv, N, D]
    values: torch.Tensor  # [B, Hkv, N, D]
    lens: torch.Tensor  # [B] int32


View = PartialView | CompactView


def _results(
    query: torch.Tensor, out: torch.Tensor | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What an attention op writes to: `out` and, when asked for, the rows' LSE."""
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not return_lse:
        return out, None
    _require_rank(query, "query", 3, "[rows, heads, channels]")
    return out, torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)


def verify_attention(
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
    view: View | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    max_rows: int = 0,
    plan: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
    route: str = "",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of in-flight rows to their request's prefix and to each other.

    Row t of request b (`query_start[b] <= t < query_start[b+1]`) sees the first `prefix_lens[b]`
    tokens of its pages, or the tokens of `view`, and of its own request's rows those whose bit is
    set in `tree_mask[t]` (bit j: row `query_start[b] + j`); without a mask, itself and the rows
    before. K/V of rows is read from `key`, `value`, never from the cache. A row that sees nothing
    gets zeros and an LSE of -inf. With `window` a row at position p sees positions > p - window.

    Returns `out` [T, Hq, D], and with `return_lse` also the natural-log LSE [T, Hq] (float32).

    `max_rows`: rows of the longest request, if known; chooses tile and route. Our own kernels give
    the same result with a wrong one, FlashAttention's rely on it.
    `plan`: what `verify_plan` made for these lengths, so that a step's layers share it (CUDA).
    `status`: int64[8] that a CUDA kernel sets when it finds a length or page out of range. With a
    `plan` our kernels judge lengths in `verify_plan`, which takes the same tensor.
    `route`: a name of `route_report()`, "auto" or "fast", instead of NWOR_SPECPV_ATTENTION_ROUTE. A
    FlashAttention package asked for by name is imported; "auto" takes one that has been.
    "fast" gives compute-bound steps to FlashAttention-3, where a row's bits depend on the batch. A
    FlashAttention route with a CompactView needs every request to use the view; one that does not
    is reported in `status`.
    """
    if not torch.compiler.is_compiling():
        named = route or os.environ.get("NWOR_SPECPV_ATTENTION_ROUTE", "")
        if named in flash_packages.PACKAGES:
            flash_packages.load(named)
    out, lse = _results(query, out, return_lse)
    call(
        torch.ops.nwor_specpv.verify_attention.default,
        query,
        key,
        value,
        key_cache,
        value_cache,
        block_table,
        prefix_lens,
        query_start,
        tree_mask,
        scale,
        out,
        lse,
        **_flatten(view),
        k_scale=k_scale,
        v_scale=v_scale,
        window=window,
        softcap=softcap,
        max_rows=max_rows,
        plan=plan,
        status=status,
        route=route,
    )
    return out if lse is None else (out, lse)


def verify_plan(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    query_start: torch.Tensor,
    tree_mask: torch.Tensor | None = None,
    *,
    view: View | None = None,
    window: int = 0,
    max_rows: int = 0,
    plan: torch.Tensor | None = None,
    status: torch.Tensor | None = None,
) -> torch.Tensor:
    """Plans one step's work on the device, once for all layers; pass the result as `plan=`.

    It holds for calls of the same shapes, lengths, mask, view lengths, window and `max_rows`. Given
    a `plan` of the same shapes it is planned anew in place, which is what a CUDA graph captures. On
    the CPU there is nothing to plan: the result is empty, and accepted. `status`: as that of
    `verify_attention`, for lengths out of range: our kernels judge them here, pages layer by layer.
    """
    if plan is None:
        size = _C.verify_plan_bytes(
            query,
            key_cache,
            block_table,
            prefix_lens,
            query_start,
            block_size=view.block_size if isinstance(view, PartialView) else 0,
            max_rows=max_rows,
        )
        plan = torch.empty(size, dtype=torch.uint8, device=query.device)
    call(
        torch.ops.nwor_specpv.verify_plan.default,
        query,
        key_cache,
        block_table,
        prefix_lens,
        query_start,
        tree_mask,
        plan,
        **_flatten(view),
        window=window,
        max_rows=max_rows,
        status=status,
    )
    return plan


def merge_states(
    outs: Sequence[torch.Tensor] | torch.Tensor, lses: Sequence[torch.Tensor] | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over disjoint sets of tokens: `outs` N x [T, H, D], `lses` N x [T, H].

    Sums in float32 in the order given. A state whose LSE is -inf saw nothing and is not read.
    """
    outs, lses = list(outs), list(lses)
    if not outs:  # torch cannot tell a device from nothing
        raise NworError("outs: got no states, expected at least one")
    return call(torch.ops.nwor_specpv.merge_states.default, outs, lses)


def merge_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    query_start: torch.Tensor,
    tree_mask: torch.Tensor | None,
    scale: float,
    *,
    softcap: float = 0.0,
    token_lens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Adds the rows in flight to attention that another kernel has computed over the prefix.

    `prefix_out` [T, Hq, D] and `prefix_lse` [T, Hq] (natural log, float32, any strides) are
    attention of every row to its prefix; an infinite LSE, of either sign, means that a row saw
    nothing there. Rows see each other as in `verify_attention`. `out` may be `prefix_out`. Rows
    that belong to no request are left as they are. One launch on CUDA.

    With `token_lens` [B] int32, `key` and `value` [B * room, Hkv, D] hold further tokens of the
    requests instead of the rows, and every row of request b sees `token_lens[b]` of its own: drafts
    that an earlier pass has made.
    """
    out, lse = _results(query, out, return_lse)
    call(
        torch.ops.nwor_specpv.merge_rows.default,
        query,
        key,
        value,
        prefix_out,
        prefix_lse,
        query_start,
        tree_mask,
        scale,
        out,
        lse,
        softcap=softcap,
        token_lens=token_lens,
    )
    return out if lse is None else (out, lse)


def last_route() -> str:
    """The route of this process' latest verify_attention, and why it was taken."""
    return _C.last_attention_route()


def route_report() -> dict[str, str]:
    """What each route is here, and which one was taken last.

    On a machine with a GPU FlashAttention packages are imported for it: see `flash_packages`.
    """
    reasons = {}
    if torch.cuda.is_available():
        reasons = {route: flash_packages.load(route) for route in flash_packages.PACKAGES}
    report = dict(line.split(": ", 1) for line in _C.attention_routes().splitlines())
    for route, reason in reasons.items():
        if reason:
            report[route] += f" ({reason})"
    report["last taken"] = last_route()
    return report


def _flatten(view: View | None) -> dict[str, Any]:
    if view is None:
        return {}
    if isinstance(view, PartialView):
        return {
            "view_blocks": view.blocks,
            "view_num_blocks": view.num_blocks,
            "view_lens": view.view_lens,
            "view_block_size": view.block_size,
        }
    if isinstance(view, CompactView):
        return {
            "compact_keys": view.keys,
            "compact_values": view.values,
            "compact_lens": view.lens,
        }
    raise NworError(f"view: got {type(view).__name__}, expected PartialView, CompactView or None")


def _require_rank(tensor: torch.Tensor, name: str, rank: int, shape: str) -> None:
    if tensor.dim() != rank:
        raise NworError(f"{name}: got sizes {list(tensor.shape)}, expected {shape}")
