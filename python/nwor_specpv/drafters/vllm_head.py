"""Writes an EAGLE3 head as vLLM reads it: a folder for `--speculative-config`.

    python -m nwor_specpv.drafters.vllm_head FOLDER    # the shipped head of SmolLM2-135M-Instruct

vLLM has the same layer under other names. Three things differ. It stores the draft vocabulary as
differences from the draft ids, it numbers feature layers from the embedding on, and it stores the
rows of the target's output matrix for the draft vocabulary. This package's head attends to its last
512 entries, vLLM's to all entries.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from nwor_specpv.cli.parser import EXIT_USAGE, PROGRAM, Parser
from nwor_specpv.errors import NworError
from nwor_specpv.models import smollm2
from nwor_specpv.models.weights import load_weights, save_weights

from .eagle3 import SHIPPED
from .eagle3_head import Eagle3Head


def write_vllm_head(folder: Path, target: Path, head: Path = SHIPPED) -> Path:
    """Writes `head` for the model in the folder `target`, in that model's type."""
    ours = Eagle3Head.load(head)
    config = json.loads((target / "config.json").read_text())
    tensors, _ = load_weights(target / "model.safetensors")
    output = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    shape = ours.shape
    if tuple(output.shape) != (shape.target_vocabulary, shape.hidden):
        raise NworError(
            f"{target}: got an output matrix of {list(output.shape)}, expected "
            f"{[shape.target_vocabulary, shape.hidden]}: the head is for another target"
        )
    layers = [1 + layer for layer in shape.feature_layers]
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_epsilon,
        "draft_vocab_size": ours.draft_to_target.shape[0],
        "tie_word_embeddings": False,
        "fc_norm": True,
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(folder / "model.safetensors", _tensors(ours, output), {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def _tensors(head: Eagle3Head, output: torch.Tensor) -> dict[str, torch.Tensor]:
    shape, ours = head.shape, head.weights
    sizes = [shape.query_size, shape.kv_size, shape.kv_size]
    query, key, value = ours["query_key_value"].split(sizes)
    gate, up = ours["gate_up"].chunk(2)
    weights = {
        "fc": ours["fuse"],
        "norm": ours["norm"],
        "midlayer.input_layernorm": ours["token_norm"],
        "midlayer.hidden_norm": ours["hidden_norm"],
        "midlayer.self_attn.q_proj": query,
        "midlayer.self_attn.k_proj": key,
        "midlayer.self_attn.v_proj": value,
        "midlayer.self_attn.o_proj": ours["attention_output"],
        "midlayer.post_attention_layernorm": ours["mlp_norm"],
        "midlayer.mlp.gate_proj": gate,
        "midlayer.mlp.up_proj": up,
        "midlayer.mlp.down_proj": ours["down"],
        "lm_head": output[head.draft_to_target],
    }
    weights |= {f"fc_norm.{i}": norm for i, norm in enumerate(ours["feature_norm"])}
    tensors = {f"{name}.weight": weight.to(output.dtype) for name, weight in weights.items()}
    own = torch.arange(head.draft_to_target.shape[0])
    return tensors | {"d2t": head.draft_to_target - own}


def main(arguments: list[str]) -> int:
    parser = Parser(prog="nwor_specpv.drafters.vllm_head", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the head goes")
    folder = parser.parse_args(arguments).folder
    try:
        print(write_vllm_head(folder, smollm2("bfloat16")))
    except (NworError, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, NworError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
