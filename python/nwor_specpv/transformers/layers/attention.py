"""The attention function that transformers calls, and the step it belongs to.

A model gets a name (`nwor_specpv`) and one keyword (`nwor_step`), which transformers hands to the
attention function of every layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from transformers import AttentionInterface

from nwor_specpv import NworError, verify_attention, verify_plan
from nwor_specpv.transformers.sizes import window_of
from nwor_specpv.transformers.views.views import Views

from .float32_attention import float32_attention

NAME = "nwor_specpv"
_UNSAID = -1  # the layer did not say; its mask has the window
# Features of attention that are not supported.
_REFUSED = ("attention_mask", "s_aux", "sinks", "position_bias", "block_mask")


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
    partial: Views | None = None
    refreshing: bool = False  # blocks of some request are chosen anew
    tree_rows: torch.Tensor | None = None  # [B, 2] int32: the trees' rows, for a refresh
    plans: dict[int, torch.Tensor] = field(default_factory=dict)  # CUDA, by the layers' window
    # What the current layer has cached and must attend with; None: it has attended.
    cached_kv: tuple[torch.Tensor, torch.Tensor] | None = None

    def to(self, device: torch.device) -> Step:
        """A copy with its tensors on `device`."""
        moved = {
            one.name: value.to(device, non_blocking=True)
            for one in fields(self)
            if isinstance(value := getattr(self, one.name), torch.Tensor)
        }
        return replace(self, **moved)


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
    sliding_window: int | None = _UNSAID,
    softcap: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer over pages and the rows of the step; K/V was written before."""
    if nwor_step is None:
        raise NworError(
            f"model: {type(module).__name__} does not hand the keyword nwor_step to its attention; "
            "use a model that hands keywords on"
        )
    _take_cached(module, nwor_step, key, value)
    if more.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise NworError(
            f"model: {type(module).__name__} attends to later tokens; use a causal language model"
        )
    asked = {"attention_mask": attention_mask, **more}  # a mask here is the model's own
    for name in _REFUSED:
        if asked.get(name) is not None:
            raise NworError(
                f"model: a layer asks for {name}, which verify attention does not support; use a "
                "model without it"
            )
    if sliding_window == _UNSAID:
        config = getattr(module, "config", None)
        sliding_window = None if config is None else window_of(config, module.layer_idx)
    out = attend_rows(
        nwor_step,
        module.layer_idx,
        *(side[0].transpose(0, 1) for side in (query, key, value)),
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
    )
    return out[None], None


def _take_cached(
    module: torch.nn.Module, step: Step, key: torch.Tensor, value: torch.Tensor
) -> None:
    """Raises unless the layer attends with the K/V that it has cached."""
    cached, step.cached_kv = step.cached_kv, None
    if cached is None or key is not cached[0] or value is not cached[1]:
        raise NworError(
            f"model: {type(module).__name__} attends with other K/V than it caches; use a model "
            "that hands the result of the cache's update to attention, once"
        )


def attend_rows(
    step: Step,
    layer: int,
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attention of one layer: rows [T, Hq, D], key and value [T, Hkv, D] -> [T, Hq, D]."""
    view = None
    if step.partial is not None:
        if step.refreshing:
            packed = rows[None].expand(step.block_table.shape[0], -1, -1, -1)
            step.partial.store.refresh_layer(layer, packed, step.block_table, step.tree_rows)
        view = step.partial.view(layer)
    arguments = (
        rows,
        key,
        value,
        *step.caches[layer],
        step.block_table,
        step.prefix_lens,
        step.query_start,
        step.tree_mask,
        scale,
    )
    options = {"view": view, "window": window, "softcap": softcap, "max_rows": step.max_rows}
    if not rows.is_cuda:
        return _attend_on_cpu(step, arguments, options)
    if rows.dtype == torch.float32:
        return float32_attention(*arguments, positions=step.positions, **options)
    return verify_attention(*arguments, **options, plan=_plan(step, rows, layer, view, options))


def _attend_on_cpu(step: Step, arguments: tuple, options: dict[str, Any]) -> torch.Tensor:
    """Leaves out the rows of a padded step that belong to no request."""
    total, own = len(step.tokens), int(step.query_start[-1])
    if own == total:
        return verify_attention(*arguments, **options)
    rows, mask = [side[:own] for side in arguments[:3]], arguments[8]
    mask = None if mask is None else mask[:own]
    out = torch.zeros_like(arguments[0], memory_format=torch.contiguous_format)
    verify_attention(*rows, *arguments[3:8], mask, arguments[9], **options, out=out[:own])
    return out


def _plan(
    step: Step, rows: torch.Tensor, layer: int, view: Any, options: dict[str, Any]
) -> torch.Tensor:
    """The plan of a step, made once for all layers of one window."""
    window = options["window"]
    if window not in step.plans:
        step.plans[window] = verify_plan(
            rows,
            step.caches[layer][0],
            step.block_table,
            step.prefix_lens,
            step.query_start,
            step.tree_mask,
            view=view,
            window=window,
            max_rows=step.max_rows,
        )
    return step.plans[window]


AttentionInterface.register(NAME, attend)
