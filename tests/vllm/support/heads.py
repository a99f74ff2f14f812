"""Heads for the story model, of made-up weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nwor_specpv.models import stories


def story_head(folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Speculation with an EAGLE3 head for the story model that knows nothing."""
    config = json.loads((Path(stories(64)) / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    config |= {"draft_vocab_size": config["vocab_size"], "tie_word_embeddings": False}
    config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    path = folder / "head"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (config["vocab_size"], hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    generator = torch.Generator().manual_seed(2)
    weights = {
        f"{name}.weight": (0.05 * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in shapes.items()
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in ("norm", *(f"midlayer.{norm}" for norm in norms)):
        weights[f"{name}.weight"] = torch.ones(hidden, dtype=dtype)
    save_file(weights, path / "model.safetensors")
    return {"method": "eagle3", "model": str(path), "num_speculative_tokens": 8}
