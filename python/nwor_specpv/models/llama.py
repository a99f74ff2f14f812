"""Names and shapes of Llama weights, and their rotary order, as transformers and vLLM expect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LlamaShape:
    """The sizes in the config.json of a Llama with tied embeddings."""

    vocabulary: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    rope_theta: float
    norm_epsilon: float

    def config(self, dtype: str, **more: Any) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.norm_epsilon,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "dtype": dtype,
            "torch_dtype": dtype,
            **more,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a checkpoint, in the order it is written."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        per_layer = {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (query, self.hidden),
            "self_attn.k_proj.weight": (kv, self.hidden),
            "self_attn.v_proj.weight": (kv, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, query),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden)
        }
        for layer in range(self.num_layers):
            found |= {f"model.layers.{layer}.{name}": shape for name, shape in per_layer.items()}
        found["model.norm.weight"] = (self.hidden,)
        return found


def pairs_to_halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorders rows of a query or key projection from pairs (0, 1), (2, 3), .. to halves.

    llama.cpp and llama2.c rotate neighbours; transformers and vLLM rotate a head's first half
    against its second.
    """
    pairs = weight.view(num_heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)
