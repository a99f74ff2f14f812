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
    """Blocks of `block_size` tokens in the paged cache, per KV head and in token order.

    Block id = page * (page_size / block_size) + part. A request sees `view_lens[b]` tokens; its
    last block may be partly filled. `num_blocks[b] = -1`: request b uses its whole prefix.
    """

    blocks: torch.Tensor  # [B, Hkv, max_blocks] int32
    num_blocks: torch.Tensor  # [B] int32
    view_lens: torch.Tensor  # [B] int32
    block_size: int


@dataclass
class CompactView:
    """A contiguous copy of the tokens to attend to. `lens[b] = -1`: request b uses its prefix."""

    keys: torch.Tensor  # [B, Hkv, N, D]
    values: torch.Tensor  # [B, Hkv, N, D]
    lens: torch.Tensor  # [B] int32


View = PartialView | CompactView


def _results(
    query: torch.Tensor, out: torch.Tensor | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The outputs of an attention op: `out` and, with `return_lse`, the rows' LSE."""
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
    prefix_ready: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of in-flight rows to their request's prefix and to each other.

    Row t of request b (`query_start[b] <= t < query_start[b+1]`) sees the first `prefix_lens[b]`
    tokens of its pages, or the tokens of `view`, and those rows of its own request whose bit is
    set in `tree_mask[t]` (bit j: row `query_start[b] + j`). Without a mask it sees itself and the
    rows before it. K and V of in-flight rows come from `key` and `value`, never from the cache. A
    row that sees no token gets zeros and an LSE of -inf. With `window`, a row at position p sees
    positions > p - window.

    Returns `out` [T, Hq, D], and with `return_lse` also the natural-log LSE [T, Hq] (float32).
    `out` must not overlap itself or any input.

    `max_rows`: rows of the longest request, if known; chooses tile and route. Our kernels give the
    same result with any value; FlashAttention's need an upper bound.
    `plan`: from `verify_plan` for these lengths, shared by the layers of a step (CUDA).
    `status`: int64[8], set by a CUDA kernel if a length or page is out of range. With a `plan`,
    lengths are checked in `verify_plan`, which takes the same tensor.
    `route`: a name of `route_report()`, or "auto", instead of NWOR_SPECPV_ATTENTION_ROUTE. A
    FlashAttention package requested by name is imported; "auto" uses one that already is.
    On a FlashAttention route with a CompactView every request must use the view; one that does not
    is reported in `status`.
    `prefix_ready`: with a `plan` on CUDA, reading the prefix may begin while the launch ahead of
    this call still runs. Plan, block table, view and the prefix's tokens must have been written by
    launches that had ended when that one began, and it must not write them: projections, rotations
    and the staging of drafts may run ahead, `verify_plan`, a commit, the making of a view or a
    prefill into pages of another request's prefix may not. The result is the same.
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
        prefix_ready=prefix_ready,
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
    """Makes the scheduler metadata of a step, once for all layers; pass the result as `plan=`.

    It is valid for calls with the same shapes, lengths, mask, view lengths, window and `max_rows`.
    A `plan` of the same shapes is overwritten in place, which a CUDA graph can capture. On the CPU
    there is nothing to plan: the result is empty, and `verify_attention` accepts it. `status`: as
    in `verify_attention`. Lengths are checked here, pages in the calls of the layers.
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

    Sums are float32, in the order given. A state whose LSE is -inf saw no token and is not read.
    """
    outs, lses = list(outs), list(lses)
    if not outs:  # without tensors torch knows no device
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
    behind_verify: bool = False,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention among the in-flight rows, merged with attention over the prefix.

    `prefix_out` [T, Hq, D] and `prefix_lse` [T, Hq] (natural log, float32, any strides) are the
    attention of every row to its prefix, from another kernel. An infinite LSE, of either sign,
    means that a row saw no token there. Rows see each other as in `verify_attention`. `out` may be
    `prefix_out` itself; otherwise it must not overlap itself or any input. Rows that belong to no
    request are not written. One launch on CUDA.

    With `token_lens` [B] int32, `key` and `value` [B * room, Hkv, D] hold other tokens of the
    requests instead of the rows, and every row of request b sees the first `token_lens[b]` of its
    request's: drafts that an earlier pass has made.

    `behind_verify`: the launch ahead is `verify_attention` on the route cuda, which ends after all
    before it, so on CUDA this one may start early. Other kernels may end before those they were
    launched behind, as FlashAttention-3's combine does.
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
        behind_verify=behind_verify,
    )
    return out if lse is None else (out, lse)


def last_route() -> str:
    """The route of this process' latest verify_attention, and why it was chosen."""
    return _C.last_attention_route()


def route_report() -> dict[str, str]:
    """The state of each route in this process, and the route that was used last.

    On a machine with a GPU this imports FlashAttention packages: see `flash_packages`.
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
