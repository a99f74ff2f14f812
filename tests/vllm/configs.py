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
