"""The target in training: a Llama or Qwen2 that runs a large batch and returns its features.

Training runs thousands of rows at one position over a contiguous cache, and needs the outputs of
three layers in every step, so it does not use a host.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from nwor_specpv.drafters.eagle3_head import rotate, rotation
from nwor_specpv.errors import NworError, logger
from nwor_specpv.models.weights import load_weights


class TrainingTarget:
    """A Llama or Qwen2 from a Hugging Face folder. Not thread-safe."""

    def __init__(
        self,
        folder: Path,
        feature_layers: tuple[int, ...] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config = _read_config(folder)
        self.vocabulary, self.hidden = config["vocab_size"], config["hidden_size"]
        self.intermediate, self.num_layers = (
            config["intermediate_size"],
            config["num_hidden_layers"],
        )
        self.num_heads, self.num_kv_heads = (
            config["num_attention_heads"],
            config["num_key_value_heads"],
        )
        self.head_dim = config.get("head_dim") or self.hidden // self.num_heads
        self.context = config["max_position_embeddings"]
        self.rope_theta = _rope(config).get("rope_theta", config.get("rope_theta", 10000.0))
        self.norm_epsilon = config["rms_norm_eps"]
        self.feature_layers = feature_layers or published_layers(self.num_layers)
        self.device, self.dtype = torch.device(device), dtype
        loaded = _load_all(folder)
        weights = {name: tensor.to(device, dtype) for name, tensor in loaded.items()}
        self.embedding = weights["model.embed_tokens.weight"]
        tied = config.get("tie_word_embeddings")
        if not tied and "lm_head.weight" not in weights:
            raise NworError(f"{folder}: got no lm_head.weight, expected it or tied embeddings")
        self.output = self.embedding if tied else weights["lm_head.weight"]
        self.norm = weights["model.norm.weight"]
        self.layers = [_layer(weights, index) for index in range(self.num_layers)]
        cos, sin = rotation(self.context, self.head_dim, self.rope_theta)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)
        self._cache: torch.Tensor | None = None
        self.decode_attention = None
        if self.device.type == "cuda":
            groups = self.num_heads // self.num_kv_heads
            self.decode_attention = _decode_attention(self.device, dtype, self.head_dim, groups)

    def allocate(self, batch: int, length: int) -> None:
        """Allocates an empty cache for `batch` rows of `length` positions."""
        shape = (self.num_layers, 2, batch, self.num_kv_heads, length, self.head_dim)
        if self._cache is None or self._cache.shape != shape:
            self._cache = None
            self._cache = torch.zeros(shape, device=self.device, dtype=self.dtype)

    def release(self) -> None:
        self._cache = None

    @torch.no_grad()
    def step(
        self, tokens: torch.Tensor, position: int, start: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs `tokens` [B, n] at row positions `position` .. and keeps their keys and values.

        A row's text begins at `start` [B]: positions count from there, and nothing before is seen.
        Returns the features [B, n, layers * hidden] and the normalised last outputs [B, n, hidden].
        """
        count = tokens.shape[1]
        end = position + count
        own = torch.arange(position, end, device=self.device)
        turn = (own - start[:, None]).clamp_(min=0)
        cos, sin = self._cos[turn][:, :, None], self._sin[turn][:, :, None]
        rotated = (self.num_heads + self.num_kv_heads) * self.head_dim
        fast = self.decode_attention if count == 1 else None
        bias = None if fast else self._bias(own, end, start)
        hidden, features = self.embedding[tokens], []
        for index, layer in enumerate(self.layers):
            normed = self._norm(hidden, layer["attention_norm"])
            projected = linear(normed, layer["query_key_value"], layer["query_key_value_bias"])
            turned = rotate(projected[..., :rotated].unflatten(-1, (-1, self.head_dim)), cos, sin)
            query, key = turned[:, :, : self.num_heads], turned[:, :, self.num_heads :]
            value = projected[..., rotated:].unflatten(-1, (-1, self.head_dim))
            keys, values = self._cache[index]
            keys[:, :, position:end] = key.transpose(1, 2)
            values[:, :, position:end] = value.transpose(1, 2)
            if fast:
                grouped = query.unflatten(2, (self.num_kv_heads, -1))[:, 0]
                attended = fast(grouped.contiguous(), keys, values, position, start)
                attended = attended.flatten(1)[:, None]
            else:
                attended = self._attend(query, keys, values, bias)
            hidden = hidden + linear(attended, layer["attention_output"])
            normed = self._norm(hidden, layer["mlp_norm"])
            gate, up = linear(normed, layer["gate_up"]).chunk(2, dim=-1)
            hidden = hidden + linear(silu(gate).mul_(up), layer["down"])
            if index in self.feature_layers:
                features.append(hidden)
        return torch.cat(features, dim=-1), self._norm(hidden, self.norm)

    def _bias(self, own: torch.Tensor, end: int, start: torch.Tensor) -> torch.Tensor:
        """[B, Hkv, groups * n, span]: 0 where a row is seen, else -inf."""
        # Keys are read in multiples of 16, since fused kernels need aligned masks.
        groups = self.num_heads // self.num_kv_heads
        span = min(-(-end // 16) * 16, self._cache.shape[4])
        place = torch.arange(span, device=self.device)
        seen = (place >= start[:, None, None]) & (place <= own[:, None])  # [B, n, span]
        bias = torch.zeros(seen.shape, device=self.device, dtype=self.dtype)
        bias.masked_fill_(~seen, float("-inf"))
        return bias[:, None].repeat(1, 1, groups, 1).expand(-1, self.num_kv_heads, -1, -1)

    def _attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        """query [B, n, Hq, D] -> [B, n, Hq * D]."""
        # The query heads of a group are rows for their key head, so keys are not repeated.
        grouped = query.unflatten(2, (self.num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        span = bias.shape[-1]
        attended = scaled_dot_product_attention(
            grouped.flatten(2, 3), keys[:, :, :span], values[:, :, :span], attn_mask=bias
        )
        return attended.unflatten(2, grouped.shape[2:4]).permute(0, 3, 1, 2, 4).flatten(2)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Scores of the vocabulary in float32; in half precision the best tokens often tie."""
        return multiply_float(normed, self.output)

    def _norm(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(values, values.shape[-1:], weight, self.norm_epsilon)


def _decode_attention(
    device: torch.device, dtype: torch.dtype, head_dim: int, groups: int
) -> Callable[..., torch.Tensor] | None:
    """The Triton kernel for single tokens, or None if it cannot run here."""
    try:
        from .decode_kernel import decode_attention

        query, start = torch.ones(1, 1, groups, head_dim), torch.zeros(1, dtype=torch.int64)
        keys = torch.ones(1, 1, 64, head_dim, device=device, dtype=dtype)
        decode_attention(query.to(device, dtype), keys, keys, 20, start.to(device)).sum().item()
    except Exception as error:  # a missing compiler raises many kinds of errors
        logger.warning(
            "train: the Triton kernel cannot run, so torch's attention is used: %s", error
        )
        return None
    return decode_attention


def published_layers(num_layers: int) -> tuple[int, ...]:
    """The layers that EAGLE3's authors use: a low one, the middle one, a high one."""
    low, high = min(2, num_layers - 1), max(num_layers - 3, 0)
    return tuple(sorted({low, num_layers // 2, high}))


def multiply_float(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """rows [.., H] times matrix [V, H] transposed, summed and returned in float32."""
    if rows.dtype == torch.float32:
        return linear(rows, matrix)
    if rows.is_cuda:
        flat = torch.mm(rows.reshape(-1, rows.shape[-1]), matrix.T, out_dtype=torch.float32)
        return flat.unflatten(0, rows.shape[:-1])
    return linear(rows.float(), matrix.float())


def _read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json; raises unless `TrainingTarget` can run the model."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NworError(f"{folder}: config.json cannot be read: {error}") from None
    if config.get("model_type") not in ("llama", "qwen2"):
        got = config.get("model_type")
        raise NworError(f"{folder}: got {got!r}, expected a llama or a qwen2")
    rope = _rope(config)
    for name, got, expected in (
        ("hidden_act", config.get("hidden_act", "silu"), "silu"),
        ("attention_bias", bool(config.get("attention_bias")), False),
        ("mlp_bias", bool(config.get("mlp_bias")), False),
        ("use_sliding_window", bool(config.get("use_sliding_window")), False),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
    ):
        if got != expected:
            raise NworError(f"{folder}: got {name} {got!r}, expected {expected!r}")
    return config


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters as transformers 5 writes them, or as earlier versions did."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _load_all(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in `folder`, of one file or of several."""
    whole = folder / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(folder.glob("model-*.safetensors"))
    if not files:
        raise NworError(f"{folder}: got no model.safetensors, expected a Hugging Face model folder")
    return {name: one for file in files for name, one in load_weights(file)[0].items()}


def _layer(weights: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor | None]:
    def part(name: str, kind: str = "weight") -> torch.Tensor:
        return weights.pop(f"model.layers.{index}.{name}.{kind}")

    biased = f"model.layers.{index}.self_attn.q_proj.bias" in weights
    biases = [part(f"self_attn.{name}_proj", "bias") for name in "qkv"] if biased else []
    return {
        "query_key_value_bias": torch.cat(biases) if biased else None,
        "attention_norm": part("input_layernorm"),
        "query_key_value": torch.cat([part(f"self_attn.{name}_proj") for name in "qkv"]),
        "attention_output": part("self_attn.o_proj"),
        "mlp_norm": part("post_attention_layernorm"),
        "gate_up": torch.cat([part("mlp.gate_proj"), part("mlp.up_proj")]),
        "down": part("mlp.down_proj"),
    }
