"""Models of dummy weights with a real model's shapes, and folders that vLLM loads them from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
}


def eagle_head(folder: Path) -> Path:
    head = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    return write_config(folder / "head", LLAMA_8B | head | {"draft_vocab_size": 32000})


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_model(folder: Path, tokenizer: Path) -> Path:
    """A folder of LLAMA_8B for a server: its configuration, and another model's tokenizer with
    words of its own for the rest of the vocabulary. Text is encoded as that model does."""
    write_config(folder, LLAMA_8B)
    shutil.copy(tokenizer / "tokenizer_config.json", folder)
    told = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))
    words = told["model"]["vocab"]
    known = {*words.values(), *(token["id"] for token in told["added_tokens"])}
    words |= {f"word{i}": i for i in range(LLAMA_8B["vocab_size"]) if i not in known}
    (folder / "tokenizer.json").write_text(json.dumps(told), encoding="utf-8")
    return folder
