"""Prompts of one call that begin alike: what they share is computed once."""

from __future__ import annotations

import pytest

from nwor_specpv.transformers import Generator
from nwor_specpv.transformers.runner import ModelRunner
from tests.python.specpv.contexts import seeded
from tests.python.transformers.test_specpv_modes import TREE, configured
from tests.python.transformers.tiny_models import Oracle, decode_plainly, random_prompt, tiny


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every pass from now on."""
    run, seen = ModelRunner.run, []

    def counted(self, step, *more):
        seen.append(len(step.tokens))
        return run(self, step, *more)

    monkeypatch.setattr(ModelRunner, "run", counted)
    return seen


@pytest.mark.parametrize("layers", [(), (0, 2)])
@pytest.mark.parametrize("page_size", [4, 16])
def test_the_common_part_is_run_once(
    layers: tuple[int, ...], page_size: int, rows: list[int]
) -> None:
    rng = seeded()
    common = random_prompt(rng, 60, 70)
    prompts = [[*common, 1, first, *random_prompt(rng, 3, 9)] for first in (2, 3, 4)]
    other = 5 if common[20] != 5 else 6
    prompts += [prompts[0], [*common[:20], other, 6]]
    truths = {tuple(p): decode_plainly(tiny(), p, 16) for p in prompts}
    drafter = Oracle(truths, rng, feature_layers=layers)
    generator = Generator(
        tiny(), drafter=drafter, page_size=page_size, prefill_rows=1000, check_contract=True
    )
    result = generator.generate(prompts, 16, tree=TREE)
    assert result.token_ids == [truths[tuple(prompt)] for prompt in prompts]
    assert result.stats.violations == []
    new = [len(prompts[0]), *(len(one) - len(common) - 1 for one in prompts[1:3]), 1, 2]
    assert rows[:5] == new
    assert result.stats.reused_tokens == sum(map(len, prompts)) - sum(new)
    again = generator.generate(prompts[::-1], 16, tree=TREE)
    assert again.token_ids == result.token_ids[::-1]


def test_sequences_of_one_prompt_share_it(rows: list[int]) -> None:
    prompt = random_prompt(seeded(), 40, 60)
    generator = Generator(tiny(), drafter="none", prefill_rows=1000)
    told = generator.generate(prompt, 6, 1.0, seed=3, num_return_sequences=4)
    assert rows[:4] == [len(prompt), 1, 1, 1]
    assert len({tuple(ids) for ids in told.token_ids}) > 1


def test_views_over_shared_prompts_see_what_they_see_alone() -> None:
    rng = seeded()
    common = random_prompt(rng, 80, 90)
    prompts = [[*common, *random_prompt(rng, 5, 20)] for _ in range(3)]
    truths = {tuple(p): decode_plainly(tiny(), p, 24) for p in prompts}
    drafter = Oracle(truths, rng, feature_layers=(1,))
    generator = Generator(
        tiny(), drafter=drafter, specpv=configured("lossless"), pace=False, check_contract=True
    )
    result = generator.generate(prompts, 24, tree=TREE)
    assert result.token_ids == [truths[tuple(prompt)] for prompt in prompts]
    assert result.stats.step_kinds["partial"] > 0
    assert result.stats.violations == []


def test_generators_that_share_a_cache_keep_each_others_prompts() -> None:
    """One needs the features of the prompts, the other does not, and a call has as many prompts as
    are kept."""
    rng = seeded()
    prompts = [random_prompt(rng, 20, 30) for _ in range(8)]
    truths = {tuple(p): decode_plainly(tiny(), p, 6) for p in prompts}
    plain = Generator(tiny(), drafter="none", cache_tokens=2048)
    drafter = Oracle(truths, rng, feature_layers=(1,))
    featured = Generator(drafter=drafter, cache_of=plain)
    featured.generate(prompts, 6, tree=TREE)
    again = sum(map(len, prompts)) - len(prompts)
    for generator in (plain, featured, plain, featured):
        result = generator.generate(prompts, 6, tree=TREE)
        assert result.token_ids == [truths[tuple(prompt)] for prompt in prompts]
        assert result.stats.reused_tokens == again
