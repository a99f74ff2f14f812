"""Qwen2 models in the host: biases that are not 0, tied or not, in every mode."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2ForCausalLM

from nwor_specpv.drafters import TreeConfig
from nwor_specpv.transformers import Generator
from tests.python.specpv.contexts import seeded
from tests.python.transformers.test_layers import replaced_layers
from tests.python.transformers.test_specpv_modes import TREE, configured
from tests.python.transformers.tiny_models import (
    FAMILIES,
    TREES,
    Oracle,
    clear_prompt,
    decode_plainly,
)


@cache
def qwen2(tied: bool) -> PreTrainedModel:
    torch.manual_seed(9)
    model = Qwen2ForCausalLM(FAMILIES["qwen2"](tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(std=0.5)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    return model


def make(rng: random.Random, tied: bool, **options: Any) -> tuple[Generator, list, list]:
    model = qwen2(tied)
    drawn = [clear_prompt(model, rng, 70, 110, 32) for _ in range(2)]
    truths = {tuple(prompt): truth for prompt, truth in drawn}
    drafter = Oracle(truths, rng, feature_layers=(0, 2))
    generator = Generator(model, drafter=drafter, check_contract=True, **options)
    return generator, [prompt for prompt, _ in drawn], [truth for _, truth in drawn]


@pytest.mark.parametrize("tied", [True, False])
def test_biases_count(tied: bool) -> None:
    """The random model says something else without them."""
    model = qwen2(tied)
    prompt = list(range(1, 20))
    truth = decode_plainly(model, prompt, 16)
    assert replaced_layers(model) == [0, 1, 2]
    for name, weight in model.named_parameters():
        if name.endswith("q_proj.bias"):
            before = weight.data.clone()
            weight.data.zero_()
            changed = decode_plainly(model, prompt, 16)
            weight.data.copy_(before)
            if changed != truth:
                return
    pytest.fail("no bias changed a token")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("tree", [*TREES, "chosen"])
def test_trees_and_chains_give_plain_decoding(tied: bool, tree: str) -> None:
    generator, prompts, truths = make(seeded(), tied)
    result = generator.generate(prompts, 32, tree=TREES.get(tree, TreeConfig()))
    assert result.token_ids == truths
    assert result.stats.violations == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("storage", ["paged", "compact"])
def test_lossless_views_give_plain_decoding(tied: bool, storage: str) -> None:
    config = configured("lossless", specpv_storage=storage, specpv_offload=storage == "compact")
    generator, prompts, truths = make(seeded(), tied, specpv=config, pace=False)
    result = generator.generate(prompts, 32, tree=TREE)
    assert result.token_ids == truths
    assert result.stats.step_kinds["partial"] > 0
    assert result.stats.violations == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("mode", ["rectify", "refresh"])
def test_lossy_views_run_and_commit_by_the_contract(tied: bool, mode: str) -> None:
    generator, prompts, truths = make(seeded(), tied, specpv=configured(mode))
    result = generator.generate(prompts, 32, tree=TREE)
    assert [len(ids) for ids in result.token_ids] == [32, 32]
    assert [ids[0] for ids in result.token_ids] == [truth[0] for truth in truths]
    assert result.stats.step_kinds["partial"] > 0
    assert result.stats.violations == []


@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_model_and_sampling(tied: bool) -> None:
    model, prompt = qwen2(tied), list(range(1, 30))
    plain = Generator(model, drafter="none").generate(prompt, 24, 0.8, seed=3)
    drafted = Generator(model, drafter="draft_model", draft_model=qwen2(not tied))
    told = drafted.generate(prompt, 24, 0.8, seed=3, tree=TREES["chain"])
    assert told.token_ids == plain.token_ids
    own = Generator(model, drafter="draft_model", draft_model=model)
    assert own.generate(prompt, 24, tree=TREES["chain"]).stats.accepted > 12
