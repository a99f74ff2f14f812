"""Retrieval: block summaries, the choice of blocks, and the views made of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nwor_specpv.errors import NworError

from ._call import call

__all__ = ["block_summaries", "build_view", "gather_view", "select_blocks"]


def block_summaries(
    key_cache: torch.Tensor,
    block_table: torch.Tensor,
    start_tokens: torch.Tensor,
    end_tokens: torch.Tensor,
    kmax: torch.Tensor,
    kmin: torch.Tensor,
    block_size: int,
    k_scale: torch.Tensor | None = None,
    done_blocks: torch.Tensor | None = None,
    *,
    by_pages: bool = False,
) -> None:
    """Channelwise maximum and minimum of K over each complete block of tokens.

    Row i of `kmax[b]`, `kmin[b]` [B, N, Hkv, D] covers `block_size` tokens from
    `start_tokens[b] + i * block_size` on; blocks that end after `end_tokens[b]` are not touched.
    Rows below `done_blocks[b]` (int32) are there already and are left alone: as a block is always
    summarised whole, going on from there equals starting afresh, bit for bit. Summaries are
    float32, float16 or bfloat16; K of a float8 cache is multiplied by `k_scale` first.
    With `by_pages` `kmax`, `kmin` are [P, S / block_size, Hkv, D], and summaries of a block lie
    where its page lies: requests that share a page share them. `block_size` then divides the page
    size and `start_tokens`.
    """
    call(
        torch.ops.nwor_specpv.block_summaries.default,
        key_cache,
        block_table,
        start_tokens,
        end_tokens,
        kmax,
        kmin,
        block_size,
        k_scale,
        done_blocks,
        by_pages,
    )


def select_blocks(
    query: torch.Tensor,
    kmax: torch.Tensor,
    kmin: torch.Tensor,
    num_candidates: torch.Tensor,
    k: int,
    score: str = "specpv",
    query_reduce: str = "mean",
    group_reduce: str = "mean",
    selection: str = "per_head",
    *,
    query_rows: torch.Tensor | None = None,
    max_rows: int = 0,
    out: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    first_block: int = 0,
) -> torch.Tensor:
    """The `k` best of each request's first `num_candidates[b]` blocks: ids [B, Hkv, k] int32.

    `query` [B, Q, Hq, D] are the rows of a tree, after RoPE. A row scores a block
    max(q . kmax, q . kmin) (`specpv`) or sum of max(q * kmax, q * kmin) (`quest`); rows are
    reduced over queries (`mean`, `max`, `last`), then over the query heads of a KV head (`mean`,
    `max`). With `selection="shared"` all heads get the list of the scores summed over heads.
    Ids ascend and are padded with -1; equal scores go to the lower id.

    `query_rows` [B, 2] int32: only rows begin to end - 1 of request b count. `max_rows`: so many
    of them at most, if known; chooses the way, never the result. `out`: ids to write to, where a
    request with negative `num_candidates` keeps what it has; with `scores`, float32 scratch of
    B * Hkv * N elements, the call allocates nothing and can be captured. With `out`, `rows` [B]
    int32 may say which row of `out` request b has, and with `block_table` [B, pages] int32
    summaries lie by pages, see `block_summaries`: N is then the blocks of a row's pages, and the
    first candidate is block `first_block` of a request's text.
    """
    reductions = (score, query_reduce, group_reduce, selection, query_rows, max_rows)
    if out is None:
        for name, given in (("rows", rows), ("block_table", block_table)):
            if given is not None:
                raise NworError(f"{name}: got a tensor without out, expected out with it")
        return call(
            torch.ops.nwor_specpv.select_blocks.default,
            query,
            kmax,
            kmin,
            num_candidates,
            k,
            *reductions,
        )
    if out.dim() == 3 and out.shape[2] != k:
        raise NworError(f"out: got sizes {list(out.shape)}, expected {k} ids per head")
    call(
        torch.ops.nwor_specpv.select_blocks_out.default,
        query,
        kmax,
        kmin,
        num_candidates,
        *reductions,
        ids=out,
        scores=scores,
        rows=rows,
        block_table=block_table,
        first_block=first_block,
    )
    return out


def build_view(
    ids: torch.Tensor,
    block_table: torch.Tensor,
    full_lens: torch.Tensor,
    committed_lens: torch.Tensor,
    partial: torch.Tensor,
    blocks: torch.Tensor,
    num_blocks: torch.Tensor,
    view_lens: torch.Tensor,
    *,
    page_size: int,
    block_size: int,
    sink_blocks: int,
    window_blocks: int,
    rows: torch.Tensor | None = None,
) -> None:
    """The views of one step for all layers: sink, chosen blocks, window and tail, in token order.

    `ids` [L, B, Hkv, k] count blocks from the end of the sink on, as `select_blocks` gives them.
    The window begins at `full_lens[b]` less the window, rounded down to a block, and runs into the
    tail up to `committed_lens[b]`. Writes `blocks` [L, B, Hkv, max_blocks], `num_blocks` [B] and
    `view_lens` [B] (all int32): one `PartialView` per layer. A request with `partial[b] == 0`, or
    whose view would not fit, gets `num_blocks` -1: its whole prefix. With `rows` [B] int32 request
    b has row `rows[b]` of `ids`. One launch, capturable.
    """
    call(
        torch.ops.nwor_specpv.build_view.default,
        ids,
        block_table,
        full_lens,
        committed_lens,
        partial,
        blocks,
        num_blocks,
        view_lens,
        page_size,
        block_size,
        sink_blocks,
        window_blocks,
        rows,
    )


def gather_view(
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    blocks: torch.Tensor,
    lens: torch.Tensor,
    held: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    block_size: int,
) -> None:
    """Copies the tokens of views that are not held yet into contiguous memory, in all layers.

    `blocks` [L, B, Hkv, max_blocks] as `build_view` wrote them; of request b tokens `held[b]` to
    `lens[b]` - 1 (int32) go to `keys`, `values` [L, B, Hkv, N, D], then `held[b]` is `lens[b]`.
    A request with `lens[b]` -1 is left alone. Views have the caches' dtype; caches may lie in
    pinned host memory. On the CPU a length or block out of range raises and nothing is written; on
    CUDA it makes `lens[b]` -1, which in a `CompactView` means the whole prefix. Two launches, no
    host sync, capturable.
    """
    call(
        torch.ops.nwor_specpv.gather_view.default,
        list(key_caches),
        list(value_caches),
        blocks,
        lens,
        held,
        keys,
        values,
        block_size,
    )
