"""Models whose windows, angles or caches are their own: run as transformers does, or not at all."""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from nwor_specpv import NworError
from nwor_specpv.transformers import Generator
from tests.python.specpv.contexts import seeded
from tests.python.transformers.tiny_models import (
    SIZES,
    TREES,
    Oracle,
    decode_plainly,
    random_prompt,
)


@pytest.mark.parametrize("family", ["cohere2", "granite", "mixtral", "olmo2", "phi3"])
def test_other_families_with_that_attention_are_run_too(family: str) -> None:
    rng = seeded()
    more = {"sliding_window": 24} if family == "cohere2" else {}
    config = CONFIG_MAPPING[family](**SIZES | more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prompt = random_prompt(rng, 30, 60)
    truth = decode_plainly(model, prompt, 24)
    drafter = Oracle({tuple(prompt): truth}, rng)
    generator = Generator(model, drafter=drafter, check_contract=True)
    result = generator.generate(prompt, 20, eos_token_id=-1, tree=TREES["tree"])
    assert result.token_ids == truth[:20]
    assert result.stats.violations == []


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("phimoe", {"num_local_experts": 4}),
        (
            "qwen2_moe",
            {
                "use_sliding_window": True,
                "max_window_layers": 2,
                "num_experts": 4,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32,
            },
        ),
    ],
)
def test_a_window_that_only_the_models_mask_has_is_kept(family: str, more: dict) -> None:
    """Its layers hand none to attention."""
    rng = seeded()
    config = CONFIG_MAPPING[family](**SIZES | more, num_experts_per_tok=2, sliding_window=9)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prompts = [random_prompt(rng, 30, 60) for _ in range(2)]
    truths = [decode_plainly(model, prompt, 24) for prompt in prompts]
    drafter = Oracle({tuple(p): t for p, t in zip(prompts, truths, strict=True)}, rng)
    generator = Generator(model, drafter=drafter, check_contract=True)
    result = generator.generate(prompts, 20, eos_token_id=-1, tree=TREES["tree"])
    assert result.token_ids == [truth[:20] for truth in truths]
    assert result.stats.violations == []


@pytest.mark.parametrize("family", ["llama", "moshi"])
def test_a_window_that_only_the_models_cache_has_ends_its_context(family: str) -> None:
    """transformers reads its prompts without, and decodes with what its cache keeps."""
    rng = seeded()
    config = CONFIG_MAPPING[family](**SIZES, sliding_window=24)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prompt = random_prompt(rng, 9, 10)
    generator = Generator(model, drafter="ngram")
    if family == "moshi" and Version(transformers.__version__) < Version("5.21"):
        # Its decoder drops the keywords that it is given.
        with pytest.raises(NworError, match="MoshiAttention does not hand the keyword nwor_step"):
            generator.generate(prompt, 2)
        return
    truth = decode_plainly(model, prompt, 24 - len(prompt))
    assert generator.generate(prompt, 24 - len(prompt), eos_token_id=-1).token_ids == truth
    with pytest.raises(NworError, match=r"expected fewer than 24, the sliding window .* 512"):
        generator.generate([5] * 24, 1)
    with pytest.raises(NworError, match=r"expected at most 15: 9 \+ 16 is beyond 24, .* 512"):
        generator.generate(prompt, 16)


def longrope(original: int, *, nested: bool = False) -> PreTrainedModel:
    """Positions from `original` on turn all of their pass's rows by other angles."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 512 / original,
        "original_max_position_embeddings": original,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
    }
    torch.manual_seed(0)
    if not nested:
        config = LlamaConfig(**SIZES, rope_parameters=rope)
    else:
        kinds = ["full_attention", "sliding_attention", "full_attention"]
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        config = CONFIG_MAPPING["gemma3_text"](
            **SIZES,
            head_dim=16,
            layer_types=kinds,
            sliding_window=24,
            rope_parameters={"full_attention": rope, "sliding_attention": plain},
        )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("nested", [False, True])
def test_longrope_is_run_where_its_angles_are_those_of_one_token(nested: bool) -> None:
    rng = seeded()
    model = longrope(80, nested=nested)
    generator = Generator(model, drafter="ngram", prefill_rows=16)
    prompts = [random_prompt(rng, 20, 30) * 2, random_prompt(rng, 10, 11), [3]]
    for prompt in prompts:
        count = 80 - len(prompt)
        truth = decode_plainly(model, prompt, count)
        assert generator.generate(prompt, count).token_ids == truth
    truths = [decode_plainly(model, prompt, 20) for prompt in prompts]
    assert generator.generate(prompts, 20).token_ids == truths
    beyond = "80, where longrope changes its angles"
    with pytest.raises(NworError, match=f"got 80 tokens in prompt 0, .* fewer than {beyond}"):
        generator.generate([1] * 80, 1)
    with pytest.raises(
        NworError, match=rf"at most 1: 79 \+ 2 is beyond {beyond} .*context of the model is 512\)"
    ):
        generator.generate([1] * 79, 2)


def test_dynamic_angles_are_those_of_its_whole_context() -> None:
    rng = seeded()
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = LlamaConfig(**SIZES | {"max_position_embeddings": 80}, rope_parameters=rope)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    prompts = [random_prompt(rng, 20, 30) * 2, random_prompt(rng, 10, 11), [3]]
    generator = Generator(model, drafter="ngram", prefill_rows=16)
    truths = [decode_plainly(model, prompt, 20) for prompt in prompts]
    assert generator.generate(prompts, 20).token_ids == truths
    with pytest.raises(NworError, match="fewer than 80, the context of the model"):
        generator.generate([1] * 80, 1)
