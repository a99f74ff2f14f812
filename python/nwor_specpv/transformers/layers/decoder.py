"""Decoder layers of what stands in for a model: few rows go through two ops.

Around attention a layer of the Llama family has about fifty small operations, which cost more than
the arithmetic of a few rows. `attention_inputs` and `layer_output` replace them: on the CPU for
float32, on CUDA also for float16 and bfloat16.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from nwor_specpv.transformers.graphs import MOST_ROWS

from .attention import Step, attend_rows
from .linear import MAX_ROWS, is_plain
from .stand_in import is_hooked

_attention_inputs = torch.ops.nwor_specpv.attention_inputs.default
_layer_output = torch.ops.nwor_specpv.layer_output.default
# Norm, attention with rotary halves, norm, gated MLP, two residual connections, nothing else.
_KNOWN = {
    "transformers.models.llama.modeling_llama": "LlamaDecoderLayer",
    "transformers.models.mistral.modeling_mistral": "MistralDecoderLayer",
    "transformers.models.qwen2.modeling_qwen2": "Qwen2DecoderLayer",
    "transformers.models.qwen3.modeling_qwen3": "Qwen3DecoderLayer",
}
# Types for which the two ops are faster, and up to how many rows.
_DTYPES = {"cpu": (torch.float32,), "cuda": (torch.float32, torch.float16, torch.bfloat16)}
_MAX_ROWS = {"cpu": MAX_ROWS, "cuda": MOST_ROWS}
# Allowed difference between the two layers, relative to the outputs: some roundings.
_CLOSE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class RowLayer(nn.Module):
    """Replaces a decoder layer and shares its parameters; the original runs many rows."""

    def __init__(self, layer: nn.Module, window: int) -> None:
        super().__init__()
        self.layer = layer
        attention, mlp = layer.self_attn, layer.mlp
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self._index, self._scaling, self._window = attention.layer_idx, attention.scaling, window
        self._max_rows = _MAX_ROWS[attention.q_proj.weight.device.type]
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self._inputs = (
            layer.input_layernorm.weight,
            layer.input_layernorm.variance_epsilon,
            *(one.weight for one in projections),
            *(one.bias for one in projections),
            *(None if norm is None else norm.weight for norm in norms),
        )
        self._outputs = (
            attention.o_proj.weight,
            attention.o_proj.bias,
            layer.post_attention_layernorm.weight,
            layer.post_attention_layernorm.variance_epsilon,
            mlp.gate_proj.weight,
            mlp.up_proj.weight,
            mlp.down_proj.weight,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        *arguments: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        past_key_values: Any,
        nwor_step: Step,
        **more: Any,
    ) -> torch.Tensor:
        if hidden_states.shape[1] > self._max_rows:
            return self.layer(
                hidden_states,
                *arguments,
                position_embeddings=position_embeddings,
                past_key_values=past_key_values,
                nwor_step=nwor_step,
                **more,
            )
        rows = hidden_states[0]
        cos, sin = position_embeddings
        query, key, value = _attention_inputs(rows, cos[0], sin[0], *self._inputs)
        past_key_values.write(self._index, key, value)
        attended = attend_rows(
            nwor_step, self._index, query, key, value, self._scaling, window=self._window
        )
        return _layer_output(rows, attended.flatten(1), *self._outputs)[None]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # a model may read attributes of its layers
            return getattr(super().__getattr__("layer"), name)


def replace_layers(layers: nn.ModuleList, text: Any) -> None:
    """Replaces the layers that give the same results.

    `text`: the decoder's config. Of each kind one layer is run both ways; if a release of
    transformers computes something else, its own layers run.
    """
    agreed: dict[int, bool] = {}
    for name, layer in layers._modules.items():
        if not _known(layer, text):
            continue
        window = _window(layer, text)
        ours = RowLayer(layer, window)
        if window not in agreed:
            agreed[window] = _agree(layer, ours, text)
            if not agreed[window]:
                warnings.warn(
                    f"{type(layer).__name__} of this transformers differs from what nwor_specpv "
                    "computes: the model's own layers run, with slower steps",
                    stacklevel=2,
                )
        if agreed[window]:
            layers._modules[name] = ours


def _known(layer: nn.Module, text: Any) -> bool:
    """Whether it is a layer of a known class, without additions."""
    kind = type(layer)
    if _KNOWN.get(kind.__module__) != kind.__name__ or text.hidden_act not in ("silu", "swish"):
        return False
    if any(map(is_hooked, layer.modules())):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    gated = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    if not all(map(is_plain, projections + gated)) or any(one.bias is not None for one in gated):
        return False
    weights = {(one.device, one.dtype) for one in layer.parameters()}
    device, dtype = weights.pop()
    return not weights and dtype in _DTYPES.get(device.type, ())


def _window(layer: nn.Module, text: Any) -> int:
    """The window that the layer hands to attention: its own, or the model's."""
    if hasattr(layer.self_attn, "sliding_window"):
        return layer.self_attn.sliding_window or 0
    alike = type(layer).__name__ == "MistralDecoderLayer"
    return (getattr(text, "sliding_window", None) or 0) if alike else 0


class _NoCache:
    """A cache that keeps nothing, for a trial."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple:
        self._step.cached_kv = (key, value)
        return key, value

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        pass


@torch.inference_mode()
def _agree(layer: nn.Module, ours: RowLayer, text: Any, rows: int = 3) -> bool:
    """Whether both layers give the same for a few rows without a prefix."""
    attention = layer.self_attn
    weight = attention.q_proj.weight
    device, dtype = weight.device, weight.dtype
    random = torch.Generator().manual_seed(0)
    # Small inputs, so that the layer's own part of the output is large.
    hidden = (torch.randn(1, rows, text.hidden_size, generator=random) / 16).to(device, dtype)
    angles = torch.randn(1, rows, attention.head_dim // 2, generator=random).repeat(1, 1, 2)
    turns = tuple(one.to(device, dtype) for one in (angles.cos(), angles.sin()))
    heads = attention.k_proj.out_features // attention.head_dim
    cache = torch.zeros(1, 16, heads, attention.head_dim, dtype=dtype, device=device)
    step = Step(
        tokens=torch.zeros(rows, dtype=torch.int64),
        positions=torch.arange(rows),
        slots=torch.full((rows,), -1),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        prefix_lens=torch.zeros(1, dtype=torch.int32),
        query_start=torch.tensor([0, rows], dtype=torch.int32),
        tree_mask=None,
        max_rows=rows,
        caches=[(cache, cache)] * (attention.layer_idx + 1),
    ).to(device)
    theirs, own = (
        one(
            hidden,
            attention_mask=None,
            position_embeddings=turns,
            position_ids=step.positions[None],
            past_key_values=_NoCache(step),
            use_cache=True,
            nwor_step=step,
        ).double()
        for one in (layer, ours)
    )
    if theirs.shape != own.shape:
        return False
    difference = theirs - own
    if dtype == torch.float32 and difference.abs().max() > _CLOSE[dtype] * theirs.abs().max():
        return False  # a single value that is off
    return bool(difference.norm() <= _CLOSE[dtype] * theirs.norm())
