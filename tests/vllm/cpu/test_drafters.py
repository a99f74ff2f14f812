"""Drafters with heads of their own, and adapters: what is not ours stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nwor_specpv.drafters.vllm_head import write_vllm_head
from nwor_specpv.models import smollm2, stories
from support.configs import MTP
from support.engines import STAGED, STOCK, drive, greedy, own_engine, start, story_prompts
from support.engines import stats as own_stats

MAX_TOKENS = 40


def story_config() -> dict:
    return json.loads((Path(stories()) / "config.json").read_text())


def head(folder: Path, method: str) -> str:
    """A one-layer EAGLE head for the story model; its weights are whatever vLLM makes up."""
    config = story_config() | {"num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}
    if method == "eagle3":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 512}
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_layers_of_a_head_are_never_staged(tmp_path: Path, method: str) -> None:
    """The head guesses at random: nearly all is rejected, and tokens are vLLM's all the same."""
    expected = drive(start(STOCK), story_prompts(6), greedy(MAX_TOKENS)).tokens
    speculation = {"method": method, "model": head(tmp_path, method), "num_speculative_tokens": 3}
    speculation["draft_load_config"] = {"load_format": "dummy"}
    llm = start(STAGED, speculation=speculation)
    story = drive(llm, story_prompts(6), greedy(MAX_TOKENS), arrivals=[0, 0, 2, 2, 5, 9])
    assert story.tokens == expected
    engine, stats = own_engine(), own_stats()
    ours = {name for name, layer in engine.layers.items() if "Nwor" in type(layer.impl).__name__}
    assert len(ours) == story_config()["num_hidden_layers"]
    assert len(engine.layers) == len(ours) + 1
    assert ours == set(engine.own_layers)
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"] > 0
    assert stats["rejected_tokens"] > stats["committed_tokens"]
    assert engine.violations == []


@pytest.mark.slow
def test_the_shipped_head_drafts_for_its_model(tmp_path: Path) -> None:
    target = smollm2("float32")
    head = write_vllm_head(tmp_path, target)
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4}
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    asked = ("What is the capital of France?", "How does rain form?", "Tell me a story of a cat.")
    found = []
    for nwor, method in ((STOCK, None), (STAGED, speculation)):
        llm = start(nwor, speculation=method, model=str(target), kv_cache_memory_bytes=64 << 20)
        found.append(drive(llm, [turn.format(q) for q in asked], greedy(MAX_TOKENS)).tokens)
    assert found[0] == found[1]
    stats = own_stats()
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"]
    # A step of four drafts has more than 0.6 right ones; a head that is loaded wrongly has none.
    assert stats["committed_tokens"] > 0.6 * stats["staged_tokens"] / 4
    assert own_engine().violations == []


@pytest.mark.slow
def test_a_model_that_predicts_further_tokens_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MTP))
    model = {"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True}
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    found = []
    for nwor in (STOCK, STAGED):
        llm = start(nwor, speculation=speculation, **model)
        found.append(drive(llm, story_prompts(6), greedy(MAX_TOKENS)).tokens)
    assert found[0] == found[1]
    engine, stats = own_engine(), own_stats()
    assert len(engine.own_layers) == MTP["num_hidden_layers"] == len(engine.layers) - 1
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"] > 0
    assert engine.violations == []


def adapter(folder: Path) -> str:
    """A LoRA of the story model's attention, large enough to change what it says."""
    config, generator = story_config(), torch.Generator().manual_seed(1)
    hidden, size = config["hidden_size"], config["head_dim"]
    outputs = {"q_proj": config["num_attention_heads"] * size}
    outputs["v_proj"] = config["num_key_value_heads"] * size
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, width in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            shapes = {"lora_A": (8, hidden), "lora_B": (width, 8)}
            for part, shape in shapes.items():
                weights[f"{name}.{part}.weight"] = torch.randn(shape, generator=generator) * 0.3
    save_file(weights, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "stories"}
    told |= {"r": 8, "lora_alpha": 16, "target_modules": list(outputs), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return str(folder)


@pytest.mark.slow
def test_adapters_are_untouched(tmp_path: Path) -> None:
    """Requests with and without a LoRA in one batch."""
    from vllm.lora.request import LoRARequest

    request = LoRARequest("bent", 1, adapter(tmp_path))
    prompts = [{"prompt_token_ids": prompt} for prompt in story_prompts(4)]
    found = []
    for nwor in (STOCK, STAGED):
        llm = start(nwor, enable_lora=True, max_lora_rank=8)
        bent = [request, None, request, None]
        outputs = llm.generate(prompts, greedy(MAX_TOKENS), lora_request=bent, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
    assert own_stats()["staged_tokens"] > 0
    plain = drive(start(STOCK), story_prompts(4), greedy(MAX_TOKENS)).tokens
    assert found[1][0] != plain["0"], "the adapter says nothing of its own"
