"""The write and the commit of K/V rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ._call import call

__all__ = ["CommitTail", "commit", "write_kv", "write_rows"]


@dataclass
class CommitTail:
    """Compact views a commit feeds: accepted rows go to the caches and to the views, or to neither.

    Row 0 of request b, which is in the cache already, becomes token `tail_begin[b]` of its view
    (-1: the request is not fed), accepted rows the tokens after it; with a root slot of -1 they
    begin there. `tail_held[b]` becomes the number of tokens the view then has. Caches, staged rows
    and views have one dtype.
    """

    tail_keys: torch.Tensor  # [L, B, Hkv, N, D]
    tail_values: torch.Tensor
    tail_begin: torch.Tensor  # [B] int32
    root_slots: torch.Tensor  # [B] int64, -1: none
    tail_held: torch.Tensor  # [B] int32


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    stage_rows: torch.Tensor,
    staged_key: torch.Tensor,
    staged_value: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    exclusive: bool = False,
    status: torch.Tensor | None = None,
) -> None:
    """The interception point: writes each row to its cache slot and to its staging row.

    Row t of `key`, `value` [T, H, D] goes to cache slot `slot_mapping[t]` (int64) if that is >= 0
    and to staging row `stage_rows[t]` (int32) if that is >= 0. With `exclusive` a staged row does
    not go to the cache. Caches are [P, S, H, D] views of any layout with contiguous channels, of
    the rows' dtype or float8_e4m3fn with `k_scale`, `v_scale` (one element or one per head).

    On the CPU a slot or row out of range, or named twice, raises and nothing is written. On CUDA
    such a row is skipped and `status` (int64[8], optional) tells the first.
    """
    call(
        torch.ops.nwor_specpv.write_kv.default,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        stage_rows,
        staged_key,
        staged_value,
        k_scale,
        v_scale,
        exclusive,
        status,
    )


def write_rows(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """`write_kv` without staging: row t goes to cache slot `slots[t]`, one of -1 nowhere."""
    given = (key, value, key_cache, value_cache, slots, None, None, None, k_scale, v_scale)
    call(torch.ops.nwor_specpv.write_kv.default, *given)


def commit(
    staged_key: torch.Tensor,
    staged_value: torch.Tensor,
    key_caches: Sequence[torch.Tensor],
    value_caches: Sequence[torch.Tensor],
    path: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    status: torch.Tensor,
    parents: torch.Tensor | None = None,
    k_scales: Sequence[torch.Tensor] | None = None,
    v_scales: Sequence[torch.Tensor] | None = None,
    *,
    tail: CommitTail | None = None,
) -> None:
    """Moves accepted rows from staging to the caches of every layer, or none of them.

    `path` [B, depth] int32 holds staging rows, -1 padded; the first `counts[b]` of request b go to
    `slots[b, i]` in all layers. `status` (int64[8]) becomes 0 or a CommitError code (see
    `nwor_specpv.COMMIT_ERRORS`), the offending request, index and value, and the tokens committed.
    `parents` [M] int32: staging row of each row's parent, -1 for the root; without it a path must
    only ascend. One launch, no host sync, capturable in a CUDA graph. `tail`: compact views that
    the same launch feeds; a view without room refuses the commit (`tail_full`).
    """
    call(
        torch.ops.nwor_specpv.commit.default,
        staged_key,
        staged_value,
        list(key_caches),
        list(value_caches),
        path,
        counts,
        slots,
        status,
        parents,
        None if k_scales is None else list(k_scales),
        None if v_scales is None else list(v_scales),
        **({} if tail is None else vars(tail)),
    )
