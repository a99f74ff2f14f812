"""A head as vLLM reads it: its tensors, used as vLLM uses them, guess what our head guesses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.drafters import vllm_head
from nwor_specpv.drafters.eagle3_head import Eagle3Head, HeadShape
from nwor_specpv.drafters.vllm_head import write_vllm_head
from nwor_specpv.models.weights import load_weights, save_weights

SHAPE = HeadShape(
    hidden=32,
    intermediate=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    target_vocabulary=64,
    feature_layers=(0, 3, 5),
    window=128,
    rope_theta=10000.0,
    norm_epsilon=1e-5,
)


def make_target(folder: Path, vocabulary: int) -> tuple[Path, torch.Tensor]:
    folder.mkdir()
    embedding = torch.randn(vocabulary, SHAPE.hidden)
    save_weights(folder / "model.safetensors", {"model.embed_tokens.weight": embedding})
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocabulary, "hidden_size": 32}))
    return folder, embedding


def make_head(folder: Path) -> tuple[Path, Eagle3Head]:
    weights = {name: torch.randn(size) * 0.3 for name, size in SHAPE.sizes().items()}
    head = Eagle3Head(SHAPE, weights, torch.randperm(64)[:20])
    head.save(folder / "head.safetensors", torch.float32)
    return folder / "head.safetensors", head


def norm(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    values = values.double()
    return values / (values.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def test_one_entry_guesses_the_same(tmp_path: Path) -> None:
    """An entry that sees itself alone attends to its own value; vLLM's layer is written out."""
    torch.manual_seed(7)
    target, embedding = make_target(tmp_path / "target", 64)
    path, head = make_head(tmp_path)
    folder = write_vllm_head(tmp_path / "out", target, path)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert (config["draft_vocab_size"], config["intermediate_size"]) == (20, 48)
    tensors, _ = load_weights(folder / "model.safetensors")
    features, token = torch.randn(96), 11

    fused = head.fuse(features)
    _, _, value = head.project(embedding[token], fused)
    attended = value.repeat_interleave(2, dim=0).flatten()
    scores = head.normalize(head.finish(fused, attended)) @ embedding[head.draft_to_target].T

    def weight(name: str) -> torch.Tensor:
        return tensors[f"{name}.weight"].double()

    parts = [norm(part, weight(f"fc_norm.{i}")) for i, part in enumerate(features.chunk(3))]
    residual = weight("fc") @ torch.cat(parts)
    both = torch.cat(
        [
            norm(embedding[token], weight("midlayer.input_layernorm")),
            norm(residual, weight("midlayer.hidden_norm")),
        ]
    )
    own = (weight("midlayer.self_attn.v_proj") @ both).view(2, 16)
    seen = own.repeat_interleave(2, dim=0).flatten()
    residual = residual + weight("midlayer.self_attn.o_proj") @ seen
    inner = norm(residual, weight("midlayer.post_attention_layernorm"))
    gate, up = weight("midlayer.mlp.gate_proj") @ inner, weight("midlayer.mlp.up_proj") @ inner
    residual = residual + weight("midlayer.mlp.down_proj") @ (gate * gate.sigmoid() * up)
    logits = weight("lm_head") @ norm(residual, weight("norm"))
    torch.testing.assert_close(logits, scores.double(), atol=1e-3, rtol=1e-3)
    assert torch.equal(tensors["d2t"] + torch.arange(20), head.draft_to_target)


def test_another_target_is_refused(tmp_path: Path) -> None:
    target, _ = make_target(tmp_path / "target", 65)
    path, _ = make_head(tmp_path)
    with pytest.raises(NworError, match="the head is for another target"):
        write_vllm_head(tmp_path / "out", target, path)
    assert not (tmp_path / "out").exists()


def test_what_goes_wrong_on_the_command_line_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, _ = make_target(tmp_path / "target", 65)
    monkeypatch.setattr(vllm_head, "smollm2", lambda _: target)
    assert vllm_head.main([str(tmp_path / "out")]) == 2
    monkeypatch.setattr(vllm_head, "smollm2", lambda _: tmp_path / "nowhere")
    assert vllm_head.main([str(tmp_path / "out")]) == 1
    with pytest.raises(SystemExit, match="2"):
        vllm_head.main([])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert "the head is for another target" in lines[0]
    assert "config.json" in lines[1]
    assert "folder" in lines[2]
