"""Small models of random weights: what their config.json says."""

from __future__ import annotations

HYBRID = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 32,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}
WINDOW = HYBRID | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "layer_types": ["sliding_attention"] * 4,
    "sliding_window": 24,
}

# The last two layers have no K/V of their own: they attend to that of the two before.
SHARING = HYBRID | {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 512,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 2,
    "altup_active_idx": 0,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.0] * 6,
    "rope_theta": 10000.0,
    "rope_local_base_freq": 10000.0,
}

# Three layers attend to chunks of 32 tokens, the last one to everything.
CHUNKED = HYBRID | {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    "attention_chunk_size": 32,
    "no_rope_layers": [1, 1, 1, 0],
    "intermediate_size_mlp": 128,
    "interleave_moe_layer_step": 0,
    "moe_layers": [],
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "use_qk_norm": False,
}

# A dense model with a layer that predicts one token further, small; weights are made up.
MTP = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "num_nextn_predict_layers": 1,
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
