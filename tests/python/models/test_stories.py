"""The story model's folder has wider heads and computes the same function."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nwor_specpv.models import stories
from nwor_specpv.models.tiny_model import TinyModel


def forward(weights: dict[str, torch.Tensor], config: dict, tokens: list[int]) -> torch.Tensor:
    """Logits of a Llama folder, as transformers computes them: halves rotated, heads repeated."""
    d, groups = config["head_dim"], config["num_attention_heads"] // config["num_key_value_heads"]
    frequencies = config["rope_theta"] ** (-torch.arange(0, d, 2).double() / d)
    angles = torch.outer(torch.arange(len(tokens)).double(), frequencies).repeat(1, 2)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt()
        return scaled * weights[name].double()

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].double().T

    def rotate(x: torch.Tensor) -> torch.Tensor:
        swapped = torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1)
        return x * angles.cos()[:, None] + swapped * angles.sin()[:, None]

    x = weights["model.embed_tokens.weight"].double()[tokens]
    visible = torch.ones(len(tokens), len(tokens)).tril().bool()
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        h = norm(x, f"{at}.input_layernorm.weight")
        q, k, v = (project(h, f"{at}.self_attn.{n}_proj").view(len(tokens), -1, d) for n in "qkv")
        q, k, v = rotate(q), rotate(k).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / d**0.5
        probabilities = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", probabilities, v).flatten(1)
        x = x + project(mixed, f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(project(h, f"{at}.mlp.gate_proj"))
        x = x + project(gate * project(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
    return norm(x, "model.norm.weight") @ weights["model.embed_tokens.weight"].double().T


@pytest.mark.parametrize("head_dim", [32, 64])
def test_the_widened_story_model_is_the_same_function(tmp_path: Path, head_dim: int) -> None:
    made = stories(head_dim, destination=tmp_path / "stories")
    config = json.loads((made / "config.json").read_text())
    assert config["head_dim"] == head_dim
    tokens = [1, 403, 407, 261, 378, 7, 300, 411]
    logits = forward(load_file(made / "model.safetensors"), config, tokens)

    model = TinyModel()
    groups = model.shape.num_heads // model.shape.num_kv_heads

    def attend(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        scores = torch.einsum("thd,shd->hts", q, k) / model.shape.head_dim**0.5
        scores = scores.masked_fill(~torch.ones(scores.shape[1:]).tril().bool(), -torch.inf)
        return torch.einsum("hts,shd->thd", scores.softmax(-1), v)

    expected = model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attend)
    assert (logits - expected).abs().max() < 2e-3
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()
