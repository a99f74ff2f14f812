"""Our attention as transformers calls it, and the step it belongs to.

Models are told nothing but a name (`nwor_specpv`) and one keyword (`nwor_step`), which transformers
hands through to the attention function of every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from nwor_specpv import NworError, PartialStore, verify_attention

NAME = "nwor_specpv"
# What a layer may ask of attention beyond these would be left out in silence.
_REFUSED = ("s_aux", "sinks", "position_bias", "block_mask")


@dataclass
class Step:
    """The rows of one forward pass, all requests one after the other."""

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slots: torch.Tensor  # [T] int64, -1 for drafts
    block_table: torch.Tensor  # [B, pages] int32
    prefix_lens: torch.Tensor  # [B] int32
    query_start: torch.Tensor  # [B + 1] int32
    tree_mask: torch.Tensor | None  # [T, words] int64; None: every request's rows are a chain
    max_rows: int
    logit_rows: torch.Tensor | None = None  # rows whose logits are wanted; None: all
    caches: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    epoch: int = 0
    partial: PartialStore | None = None
    tree_rows: torch.Tensor | None = None  # [B, 2] int32: the trees' rows, for a refresh
    plan: torch.Tensor | None = None


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    nwor_step: Step | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over pages and rows in flight; its K/V was written before."""
    if nwor_step is None:
        raise NworError("nwor_step: got none; this attention runs inside a Generator only")
    for name in _REFUSED:
        if more.get(name) is not None:
            raise NworError(
                f"model: got a layer that asks for {name}, which verify attention has not"
            )
    step = nwor_step
    layer = module.layer_idx
    rows = query[0].transpose(0, 1)
    view = None
    if step.partial is not None:
        packed = rows[None].expand(step.block_table.shape[0], -1, -1, -1)
        step.partial.refresh_layer(layer, packed, step.block_table, step.tree_rows)
        view = step.partial.view(layer)
    out = verify_attention(
        rows,
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        *step.caches[layer],
        step.block_table,
        step.prefix_lens,
        step.query_start,
        step.tree_mask,
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        view=view,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        max_rows=step.max_rows,
        plan=step.plan,
    )
    return out[None], None


AttentionInterface.register(NAME, attend)
