"""A smaller model as the drafter: its own cache grows, ends and outlives failures."""

from __future__ import annotations

import copy
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.transformers import Generator, runner
from nwor_specpv.transformers.round import Round
from tests.python.specpv.contexts import seeded
from tests.python.transformers.tiny_models import TREES, decode_plainly, random_prompt, tiny


def test_a_smaller_model_drafts() -> None:
    rng = seeded()
    model = tiny()
    prompts = [random_prompt(rng) for _ in range(2)]
    truths = [decode_plainly(model, p, 30) for p in prompts]
    same = Generator(model, drafter="draft_model", draft_model=tiny(), check_contract=True)
    for prompt, truth in zip(prompts, truths, strict=True):
        result = same.generate(prompt, 30, tree=TREES["chain"])
        assert result.token_ids == truth
        assert result.stats.accepted_lengths[4] >= 5  # it drafts what it would say itself
    other = Generator(model, drafter="draft_model", draft_model=tiny("qwen2", 1))
    batch = other.generate(prompts, 30)
    assert batch.token_ids == truths


def test_a_smaller_model_is_loaded_in_the_type_of_the_target(tmp_path: Path) -> None:
    tiny("qwen2").save_pretrained(tmp_path)
    model = copy.deepcopy(tiny()).to(torch.bfloat16)
    generator = Generator(model, drafter="draft_model", draft_model=tmp_path)
    assert generator.drafter._runner.dtype == torch.bfloat16


def test_a_smaller_model_drafts_up_to_the_end_of_its_own_context() -> None:
    small = tiny("qwen2", max_position_embeddings=24)
    generator = Generator(tiny(), drafter="draft_model", draft_model=small)
    drafter, ran = generator.drafter, []
    run = drafter._run
    drafter._run = lambda key, prefix, rows: (
        ran.append(prefix + len(rows)) or run(key, prefix, rows)
    )
    for length in (15, 300):
        prompt = [1 + i % 90 for i in range(length)]
        result = generator.generate(prompt, 30, tree=TREES["chain"])
        assert result.token_ids == decode_plainly(tiny(), prompt, 30)
    assert max(ran) == 24


def test_a_smaller_model_drafts_the_same_when_it_is_asked_again() -> None:
    drafter = Generator(tiny(), drafter="draft_model", draft_model=tiny("qwen2")).drafter
    drafter.begin("request", [5, 6, 7])
    drafter.observe("request", [6, 7, 8], None)
    trees = [drafter.draft(["request"], TREES["chain"])[0].tokens for _ in range(2)]
    assert trees[0] == trees[1]
    assert len(trees[0]) == 5


def test_the_cache_of_a_smaller_model_grows_a_few_times_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every time it grows, all that it holds is run again."""
    context, only_roots = 12000, TreeConfig(rows=1, depth=4)
    made, paged = [], runner.PagedCache

    def make_cache(*arguments: object, **options: object) -> object:
        assert all(cache() is None for cache in made)  # the memory of the old one first
        cache = paged(*arguments, **options)
        made.append(weakref.ref(cache))
        return cache

    small = tiny("qwen2", max_position_embeddings=context)
    drafter = Generator(tiny(), drafter="draft_model", draft_model=small).drafter
    monkeypatch.setattr(runner, "PagedCache", make_cache)
    requests = ["one", "two"]
    for request in requests:
        drafter.begin(request, [1])
    for length in range(65, 14000, 64):
        for request in requests:
            drafter.observe(request, [1] * 64, None)
        drafter.draft(requests, only_roots)
        capacity = drafter._runner.cache.capacity
        assert capacity >= len(requests) * min(length, context)
    assert len(made) <= 6
    assert capacity <= len(requests) * (context + 2 * drafter._runner.page_size)


def test_a_smaller_model_that_was_interrupted_drafts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = Generator(tiny(), drafter="draft_model", draft_model=tiny("qwen2")).drafter
    for request in ("first", "second"):
        drafter.begin(request, [5, 6, 7])
        drafter.observe(request, [6, 7, 8], None)
    expected = drafter.draft(["first"], TREES["chain"])[0].tokens
    for place in ("tree_logits", "commit", "_step"):
        with monkeypatch.context() as patched:
            patched.setattr(Round, place, Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                drafter.draft(["second"], TREES["chain"])
        assert drafter.draft(["second"], TREES["chain"])[0].tokens == expected
        drafter.end("second")
        drafter.begin("second", [5, 6, 7])
        drafter.observe("second", [6, 7, 8], None)


def test_what_a_smaller_model_takes_back_is_checked() -> None:
    drafter = Generator(tiny(), drafter="draft_model", draft_model=tiny()).drafter
    drafter.begin("a", [5, 6, 7])
    drafter.observe("a", [6, 7, 8], None)
    (chain,) = drafter.draft(["a"], TREES["chain"])
    assert drafter.draft(["a"], TreeConfig(depth=4))[0].tokens == chain.tokens
    assert drafter.retract("a", 0)
    assert drafter.draft(["a"], TREES["chain"])[0].tokens == chain.tokens
    assert not drafter.retract("a", 4)  # of which three were observed
    with pytest.raises(NworError, match="num_tokens: got -1, expected 0 or more"):
        drafter.retract("a", -1)
    with pytest.raises(NworError, match="requests: got 'a' 2 times, expected every request once"):
        drafter.draft(["a", "a"], TREES["chain"])
    assert drafter.retract("a", 1)
    drafter.observe("a", [8], None)
    assert drafter.draft(["a"], TREES["chain"])[0].tokens == chain.tokens
