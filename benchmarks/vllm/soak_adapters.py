"""LoRA adapters of random weights for soak.py, and what it needs to know of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAMES = ("bent", "twisted")
RANK = 8
_SCALE = 0.1  # of the weights: answers differ from the model's own, and are still text
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def _config(model: str) -> dict[str, Any]:
    config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    return config.get("text_config", config)


def _sizes(config: dict[str, Any]) -> tuple[int, int, int]:
    """Query heads, KV heads, channels of a head."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return heads, config.get("num_key_value_heads", heads), size


def cache_bytes_of_a_token(model: str, dtype: str) -> int:
    config = _config(model)
    _, heads, size = _sizes(config)
    return 2 * config["num_hidden_layers"] * heads * size * _BYTES[dtype]


def make(folder: Path, model: str) -> list[str]:
    """Writes the adapters; the server's arguments for them."""
    modules = []
    for seed, name in enumerate(NAMES):
        path = (folder / name).resolve()
        path.mkdir(parents=True, exist_ok=True)
        _write(path, model, seed)
        modules.append(f"{name}={path}")
    # One place more than there are adapters. On a CPU vLLM computes rows without an adapter with
    # what lies in the last place (index -1 of its torch operators), where another row has one.
    places = str(len(NAMES) + 1)
    told = ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", places]
    return [*told, "--lora-modules", *modules]


def _write(path: Path, model: str, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    config, generator = _config(model), torch.Generator().manual_seed(seed)
    heads, kv_heads, size = _sizes(config)
    widths = {"q_proj": heads * size, "v_proj": kv_heads * size}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, width in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            shapes = {"lora_A": (RANK, config["hidden_size"]), "lora_B": (width, RANK)}
            for part, shape in shapes.items():
                weights[f"{name}.{part}.weight"] = _SCALE * torch.randn(shape, generator=generator)
    save_file(weights, path / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model}
    told |= {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(widths), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(told), encoding="utf-8")
