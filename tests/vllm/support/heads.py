"""Heads for the story model, of made-up weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nwor_specpv.models import stories


def story_head(
    folder: Path, dtype: torch.dtype = torch.bfloat16, method: str = "eagle3"
) -> dict[str, Any]:
    """Speculation with an EAGLE or EAGLE3 head for the story model that knows nothing."""
    config = json.loads((Path(stories(64)) / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "tie_word_embeddings": False}
    third = method == "eagle3"
    if third:
        config |= {"architectures": ["LlamaForCausalLMEagle3"]}
        config |= {"draft_vocab_size": config["vocab_size"]}
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    path = folder / method
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    # EAGLE3's layer takes embeddings beside states, and reads states of three of the target's.
    layer, read = ("midlayer", 2 * hidden) if third else ("layers.0", hidden)
    shapes = {
        "fc": (hidden, 3 * hidden if third else 2 * hidden),
        "lm_head": (config["vocab_size"], hidden),
        f"{layer}.self_attn.q_proj": (queries, read),
        f"{layer}.self_attn.k_proj": (keys, read),
        f"{layer}.self_attn.v_proj": (keys, read),
        f"{layer}.self_attn.o_proj": (hidden, queries),
        f"{layer}.mlp.gate_proj": (inner, hidden),
        f"{layer}.mlp.up_proj": (inner, hidden),
        f"{layer}.mlp.down_proj": (hidden, inner),
    }
    if not third:
        del shapes["lm_head"]  # the target's
    generator = torch.Generator().manual_seed(2)
    weights = {
        f"{name}.weight": (0.05 * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }
    norms = [f"{layer}.post_attention_layernorm"]
    if third:
        norms += ["norm", f"{layer}.hidden_norm", f"{layer}.input_layernorm"]
    for name in norms:
        weights[f"{name}.weight"] = torch.ones(hidden, dtype=dtype)
    save_file(weights, path / "model.safetensors")
    return {"method": method, "model": str(path), "num_speculative_tokens": 8}
