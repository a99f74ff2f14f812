"""The shipped 260K-parameter story model as a Hugging Face folder, for engines that load by path.

Its heads have 8 channels, fewer than serving engines support. The folder has wider heads: each
rotated pair moves to the channels of its frequency, the other channels are zero, and the queries
are scaled for the larger head size. The model computes the same function.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from nwor_specpv.models.tiny_model import TinyModel

from .folder import Progress, cache_root, convert_tensors, print_progress, write_folder
from .llama import LlamaShape

_BOS, _EOS = 1, 2


def stories(
    head_dim: int = 32,
    progress: Progress = print_progress,
    destination: Path | None = None,
) -> Path:
    """Returns the model's folder (float32, no tokenizer); writes it if it is missing."""
    destination = destination or cache_root() / f"stories260k-d{head_dim}-float32"
    if destination.is_dir():
        return destination
    model = TinyModel()
    s = model.shape
    shape = LlamaShape(
        vocabulary=s.vocabulary,
        hidden=s.dim,
        intermediate=s.hidden,
        num_layers=s.num_layers,
        num_heads=s.num_heads,
        num_kv_heads=s.num_kv_heads,
        head_dim=head_dim,
        context=s.context,
        rope_theta=10000.0,
        norm_epsilon=1e-5,
    )
    ids = {"bos_token_id": _BOS, "eos_token_id": _EOS}
    files = {"config.json": shape.config("float32", **ids), "generation_config.json": ids}
    total = len(shape.shapes())
    tensors = convert_tensors(_tensors(model, shape), total, "float32", destination.name, progress)
    return write_folder(destination, files, tensors)


def _tensors(model: TinyModel, shape: LlamaShape) -> Iterator[tuple[str, torch.Tensor]]:
    yield "model.embed_tokens.weight", model.embedding
    wide = shape.head_dim
    scores = (wide / model.shape.head_dim) ** 0.5
    for layer in range(shape.num_layers):
        parts = {
            "input_layernorm": model.attention_norm[layer],
            "self_attn.q_proj": widen_rotated(model.wq[layer], shape.num_heads, wide) * scores,
            "self_attn.k_proj": widen_rotated(model.wk[layer], shape.num_kv_heads, wide),
            "self_attn.v_proj": widen(model.wv[layer], shape.num_kv_heads, wide),
            "self_attn.o_proj": widen(model.wo[layer].T.contiguous(), shape.num_heads, wide).T,
            "post_attention_layernorm": model.ffn_norm[layer],
            "mlp.gate_proj": model.w1[layer],
            "mlp.up_proj": model.w3[layer],
            "mlp.down_proj": model.w2[layer],
        }
        for name, weight in parts.items():
            yield f"model.layers.{layer}.{name}.weight", weight
    yield "model.norm.weight", model.final_norm


def widen(weight: torch.Tensor, num_heads: int, wide: int) -> torch.Tensor:
    """Pads each head of `weight` [heads * D, columns] with zero rows to `wide` rows."""
    heads = weight.view(num_heads, -1, weight.shape[-1])
    out = weight.new_zeros(num_heads, wide, weight.shape[-1])
    out[:, : heads.shape[1]] = heads
    return out.flatten(0, 1)


def widen_rotated(weight: torch.Tensor, num_heads: int, wide: int) -> torch.Tensor:
    """Does the same for queries and keys; a pair of frequency theta^(-2i/D) keeps its frequency.

    In a head of `wide` channels rotated by halves, the pair lies at channel i * wide / D and half a
    head further.
    """
    pairs = weight.view(num_heads, -1, 2, weight.shape[-1])
    stride = wide // (2 * pairs.shape[1])
    out = weight.new_zeros(num_heads, 2, wide // 2, weight.shape[-1])
    out[:, :, ::stride] = pairs.transpose(1, 2)
    return out.reshape(num_heads * wide, -1)
