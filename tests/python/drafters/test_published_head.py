"""Heads in the folders that vLLM and SGLang read, against their layer written out in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.drafters import TreeConfig, make_drafter
from nwor_specpv.models.weights import save_weights

HIDDEN, INNER, HEADS, KV, DIM, VOCAB, DRAFTS, LAYERS = 32, 48, 4, 2, 16, 64, 20, 8
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": DRAFTS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
}
LAYER = {key: value for key, value in CONFIG.items() if key not in ("architectures",)}


def make_tensors(*, fc_norm: bool = False, embedding: bool = False) -> dict[str, torch.Tensor]:
    sizes = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "norm": (HIDDEN,),
        "midlayer.input_layernorm": (HIDDEN,),
        "midlayer.hidden_norm": (HIDDEN,),
        "midlayer.self_attn.q_proj": (HEADS * DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (KV * DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (KV * DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "midlayer.post_attention_layernorm": (HIDDEN,),
        "midlayer.mlp.gate_proj": (INNER, HIDDEN),
        "midlayer.mlp.up_proj": (INNER, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, INNER),
        "lm_head": (DRAFTS, HIDDEN),
    }
    sizes |= {f"fc_norm.{i}": (HIDDEN,) for i in range(3)} if fc_norm else {}
    sizes |= {"embed_tokens": (VOCAB, HIDDEN)} if embedding else {}
    made = {f"{name}.weight": 0.3 * torch.randn(size) for name, size in sizes.items()}
    ids = torch.randperm(VOCAB)[:DRAFTS].sort().values
    is_drafted = torch.zeros(VOCAB, dtype=torch.bool)
    is_drafted[ids] = True
    return made | {"d2t": ids - torch.arange(DRAFTS), "t2d": is_drafted}


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_target() -> Any:
    """What a drafter asks a model of transformers for."""
    embedding, output = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    text = SimpleNamespace(num_hidden_layers=LAYERS)
    return SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda decoder: text),
        get_input_embeddings=lambda: SimpleNamespace(weight=embedding),
        get_output_embeddings=lambda: SimpleNamespace(weight=output),
    )


class Reference:
    """The published layer, an entry at a time."""

    def __init__(
        self, tensors: dict[str, torch.Tensor], embedding: torch.Tensor, *, normed: bool
    ) -> None:
        self.tensors = {name: one.double() for name, one in tensors.items()}
        own = tensors.get("embed_tokens.weight", embedding)
        self.embedding, self.normed = own.double(), normed
        self.ids = tensors["d2t"] + torch.arange(DRAFTS)
        self.entries: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"]

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean() + 1e-5).sqrt() * self.of(name)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        parts = features.double().chunk(3)
        if "fc_norm.0.weight" in self.tensors:
            parts = [self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)]
        return self.of("fc") @ torch.cat(list(parts))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        angles = len(self.entries) * 10000.0 ** -(torch.arange(0, DIM, 2).double() / DIM)
        low, high = x.view(-1, DIM).chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def entry(self, hidden: torch.Tensor, token: int) -> torch.Tensor:
        of, layer = self.of, "midlayer."
        normed = self.norm(hidden, layer + "hidden_norm")
        both = torch.cat([self.norm(self.embedding[token], layer + "input_layernorm"), normed])
        query, key, value = (of(f"{layer}self_attn.{one}_proj") @ both for one in "qkv")
        query = self.turned(query)
        self.entries.append((self.turned(key), value.view(-1, DIM)))
        attended = []
        for head in range(HEADS):
            group = head * KV // HEADS
            scores = torch.stack([query[head] @ k[group] for k, _ in self.entries])
            shares = (scores / math.sqrt(DIM)).softmax(0)
            attended.append(
                sum(s * v[group] for s, (_, v) in zip(shares, self.entries, strict=True))
            )
        hidden = normed if self.normed else hidden
        hidden = hidden + of(layer + "self_attn.o_proj") @ torch.cat(attended)
        inner = self.norm(hidden, layer + "post_attention_layernorm")
        gate, up = (of(f"{layer}mlp.{one}_proj") @ inner for one in ("gate", "up"))
        return hidden + of(layer + "mlp.down_proj") @ (torch.nn.functional.silu(gate) * up)

    def best(self, hidden: torch.Tensor) -> int:
        return int(self.ids[(self.of("lm_head") @ self.norm(hidden, "norm")).argmax()])

    def chain(self, features: torch.Tensor, tokens: list[int], depth: int) -> list[int]:
        for row, token in zip(features, tokens, strict=True):
            hidden = self.entry(self.fuse(row), token)
        drafts = [self.best(hidden)]
        while len(drafts) < depth:
            hidden = self.entry(hidden, drafts[-1])
            drafts.append(self.best(hidden))
        return drafts


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize("kind", ["plain", "fc_norm", "speculators", "prefixed"])
def test_a_published_head_drafts_what_its_layer_says(
    kind: str, embedding: bool, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    tensors = make_tensors(fc_norm=kind == "fc_norm", embedding=embedding)
    config = CONFIG | ({"fc_norm": True} if kind == "fc_norm" else {})
    stored = tensors
    if kind == "speculators":
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": LAYER}
        config |= {"draft_vocab_size": DRAFTS, "norm_before_residual": True}
        stored = {name.replace("midlayer.", "layers.0."): one for name, one in tensors.items()}
    if kind == "prefixed":
        stored = {f"model.{n}" if n != "lm_head.weight" else n: t for n, t in tensors.items()}
        stored = {n.removeprefix("model.") if "2" in n else n: t for n, t in stored.items()}
    folder, target = write(tmp_path / "head", stored, config), make_target()
    drafter = make_drafter(
        "eagle3", target=target, weights=folder, dtype=torch.float32, min_probability=0.0
    )
    assert drafter.feature_layers == (1, 3, 4)  # of layers 2, 4 and 5 counted from the embedding
    for request in range(4):
        tokens = torch.randint(VOCAB, (9,)).tolist()
        features = torch.randn(8, 3 * HIDDEN)
        drafter.begin(request, tokens[:8])
        drafter.observe(request, tokens[1:], features)
        (tree,) = drafter.draft([request], TreeConfig(rows=5, depth=4, top_k=1))
        reference = Reference(
            tensors, target.get_input_embeddings().weight, normed=kind == "speculators"
        )
        assert tree.tokens == [tokens[-1], *reference.chain(features, tokens[1:], 4)]


def test_layers_are_those_of_the_config(tmp_path: Path) -> None:
    torch.manual_seed(3)
    for place in ("top", "nested"):
        ids = {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}
        config = CONFIG | (ids if place == "top" else {"eagle_config": ids})
        folder = write(tmp_path / place, make_tensors(), config)
        drafter = make_drafter("eagle3", target=make_target(), weights=folder)
        assert drafter.feature_layers == (0, 4, 7)


def test_a_head_without_an_output_matrix_uses_the_targets(tmp_path: Path) -> None:
    torch.manual_seed(3)
    tensors, target = make_tensors(), make_target()
    del tensors["lm_head.weight"]
    folder = write(tmp_path / "head", tensors, CONFIG)
    ids = tensors["d2t"] + torch.arange(DRAFTS)
    theirs = tensors | {"lm_head.weight": target.get_output_embeddings().weight[ids]}
    drafter = make_drafter(
        "eagle3", target=target, weights=folder, dtype=torch.float32, own_tokens=0
    )
    tokens, features = [1, 2, 3, 4], torch.randn(3, 3 * HIDDEN)
    drafter.begin(0, tokens[:3])
    drafter.observe(0, tokens[1:], features)
    (tree,) = drafter.draft([0], TreeConfig(rows=2, depth=1, top_k=1))
    reference = Reference(theirs, target.get_input_embeddings().weight, normed=False)
    assert tree.tokens[1:] == reference.chain(features, tokens[1:], 1)


@pytest.mark.parametrize(
    ("config", "left_out", "message"),
    [
        ({"num_hidden_layers": 2}, None, "num_hidden_layers 2, expected 1"),
        ({"norm_before_fc": True}, None, "norm_before_fc True, expected False"),
        ({"target_hidden_size": 64}, None, "target_hidden_size 64, expected 32"),
        ({"rope_scaling": {"rope_type": "llama3"}}, None, "has 'llama3' positions, expected plain"),
        ({"hidden_size": 16}, None, "weight fuse: got sizes"),
        ({"vocab_size": 50}, None, "weights: .*draft_to_target|drafter: got a target"),
        ({"intermediate_size": None}, None, "intermediate: got None"),
        ({}, "midlayer.mlp.up_proj.weight", "has no midlayer.mlp.up_proj.weight"),
    ],
)
def test_heads_that_are_not_computed_here_are_named(
    config: dict[str, Any], left_out: str | None, message: str, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    tensors = make_tensors()
    tensors.pop(left_out, None)
    folder = write(tmp_path / "head", tensors, CONFIG | config)
    with pytest.raises(NworError, match=message) as told:
        make_drafter("eagle3", target=make_target(), weights=folder)
    assert "\n" not in str(told.value)


def test_folders_without_a_head_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NworError, match=r"config.json cannot be read"):
        make_drafter("eagle3", target=make_target(), weights=tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(NworError, match=r"has no \*.safetensors file"):
        make_drafter("eagle3", target=make_target(), weights=tmp_path / "empty")
    save_weights(tmp_path / "empty" / "model.safetensors", {"x": torch.zeros(2)})
    with pytest.raises(NworError, match=r"has no fc\.weight, expected an EAGLE3 head"):
        make_drafter("eagle3", target=make_target(), weights=tmp_path / "empty")
