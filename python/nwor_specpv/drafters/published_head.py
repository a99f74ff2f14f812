"""Reads EAGLE3 heads in the folders that vLLM and SGLang read: config.json and safetensors files.

The layer is this package's under other names (see `vllm_head`, which writes such folders). Most
published heads do not normalise features, and have an output matrix of their own for the draft
vocabulary. Feature layers are counted as vLLM counts them: layer 0 is the embedding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nwor_specpv.errors import NworError
from nwor_specpv.models.weights import load_weights

from .eagle3_head import Eagle3Head, HeadShape

_WINDOW = 2048  # the most entries that an entry attends to; a published head sets no limit
_LAYER = "midlayer."
_NAMES = {
    "fuse": ("fc",),
    "norm": ("norm",),
    "token_norm": ("midlayer.input_layernorm",),
    "hidden_norm": ("midlayer.hidden_norm",),
    "query_key_value": tuple(f"midlayer.self_attn.{one}_proj" for one in "qkv"),
    "attention_output": ("midlayer.self_attn.o_proj",),
    "mlp_norm": ("midlayer.post_attention_layernorm",),
    "gate_up": ("midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"),
    "down": ("midlayer.mlp.down_proj",),
}
_SKIPPED = ("t2d", "mask_hidden")
# Settings of heads that are computed otherwise, with the value that is read here.
_EXPECTED = {
    "num_hidden_layers": 1,
    "attention_bias": False,
    "norm_before_fc": False,
    "norm_output": False,
}


@dataclass
class PublishedHead:
    """A head, and its matrices where they are not the target's."""

    head: Eagle3Head
    embedding: torch.Tensor | None  # [target vocabulary, hidden]
    output: torch.Tensor | None  # [draft vocabulary, hidden]


def load_published(folder: Path, num_layers: int) -> PublishedHead:
    """Reads the head in `folder` for a target of so many layers."""
    config = _read_config(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise NworError(
            f"weights: {folder} has no *.safetensors file, expected an EAGLE3 head as vLLM and "
            "SGLang read it; save a pytorch_model.bin with safetensors.torch.save_file"
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= {_own_name(name): one for name, one in load_weights(file, _SKIPPED)[0].items()}
    weights = {name: _joined(folder, tensors, parts) for name, parts in _NAMES.items()}
    shape = _shape(folder, config, num_layers)
    if shape.feature_norm:
        count = len(shape.feature_layers)
        norms = [_one(folder, tensors, f"fc_norm.{i}.weight") for i in range(count)]
        weights["feature_norm"] = torch.stack(norms)
    output = tensors.get("lm_head.weight")
    size = shape.target_vocabulary if output is None else len(output)
    to_target = torch.arange(size)
    if "d2t" in tensors:
        if tuple(tensors["d2t"].shape) != (size,) and output is not None:
            got = list(tensors["d2t"].shape)
            raise NworError(f"weights: {folder} has d2t of {got}, expected [{size}] by lm_head")
        to_target = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    try:
        head = Eagle3Head(shape, weights, to_target)
    except NworError as error:
        raise NworError(f"weights: {folder}: {error}") from None
    if output is not None and tuple(output.shape) != (len(to_target), shape.hidden):
        expected = [len(to_target), shape.hidden]
        raise NworError(f"weights: {folder} has lm_head of {list(output.shape)}, not {expected}")
    return PublishedHead(head, tensors.get("embed_tokens.weight"), output)


def _own_name(name: str) -> str:
    """Without the prefix of the model; vLLM's converters call the layer `layers.0`."""
    return name.removeprefix("model.").replace("layers.0.", _LAYER)


def _one(folder: Path, tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise NworError(f"weights: {folder} has no {name}, expected an EAGLE3 head of one layer")
    return tensors[name]


def _joined(folder: Path, tensors: dict[str, torch.Tensor], names: tuple[str, ...]) -> torch.Tensor:
    parts = [_one(folder, tensors, f"{name}.weight") for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read_config(folder: Path) -> dict[str, Any]:
    """Settings in one level; converters of speculators nest those of the layer."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text("utf-8"))
        nested = config.get("transformer_layer_config") or {}
        eagle = config.get("eagle_config") or {}
        if nested:
            config.setdefault("norm_before_residual", True)
        return dict(nested) | config | eagle
    except (OSError, ValueError, AttributeError, TypeError) as error:
        told = " ".join(str(error).split())
        raise NworError(f"weights: {path} cannot be read: {told}") from None


def _shape(folder: Path, config: dict[str, Any], num_layers: int) -> HeadShape:
    hidden = config.get("hidden_size")
    for name, expected in {**_EXPECTED, "target_hidden_size": hidden}.items():
        got = config.get(name)
        if got is not None and got != expected:
            raise NworError(
                f"weights: {folder} has {name} {got!r}, expected {expected!r}: such heads are not "
                "computed here"
            )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise NworError(f"weights: {folder} has {kind!r} positions, expected plain rotary ones")
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    try:
        heads = config["num_attention_heads"]
        return HeadShape(
            hidden=hidden,
            intermediate=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            target_vocabulary=config["vocab_size"],
            feature_layers=tuple(
                one - 1 for one in ids or (2, num_layers // 2, max(3, num_layers - 3))
            ),
            window=min(_WINDOW, config.get("max_position_embeddings") or _WINDOW),
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            norm_epsilon=config.get("rms_norm_eps") or 1e-6,
            feature_norm=bool(config.get("fc_norm")),
            norm_before_residual=bool(config.get("norm_before_residual")),
        )
    except (KeyError, TypeError) as error:
        raise NworError(f"weights: {folder}/config.json lacks a setting: {error}") from None
