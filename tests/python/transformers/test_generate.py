"""Generator against plain decoding with transformers' own cache: tiny models of four families."""

from __future__ import annotations

import copy
import json
import random

import numpy as np
import pytest
import torch

from nwor_specpv import NworConfig, NworError
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.transformers import Generator, runner
from nwor_specpv.transformers.round import Round
from tests.python.specpv.contexts import seeded
from tests.python.transformers.tiny_models import (
    FAMILIES,
    TREES,
    Oracle,
    clear_prompt,
    decode_plainly,
    random_prompt,
    tiny,
)


def make(rng: random.Random, family: str = "llama", count: int = 3, **options):
    """A model, prompts, how they go on, and a checked generator whose drafter knows it."""
    model = tiny(family)
    drawn = [clear_prompt(model, rng, 3, 40) for _ in range(count)]
    prompts = [prompt for prompt, _ in drawn]
    truths = {tuple(prompt): truth for prompt, truth in drawn}
    layers = options.pop("feature_layers", ())
    drafter = options.pop("drafter", None) or Oracle(truths, rng, feature_layers=layers)
    generator = Generator(model, drafter=drafter, check_contract=True, **options)
    return generator, prompts, [truths[tuple(p)] for p in prompts]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tree", [*TREES, "chosen"])
def test_every_family_decodes_as_transformers_does(family: str, tree: str) -> None:
    rng = seeded()
    generator, prompts, truths = make(rng, family, feature_layers=(0, 2))
    for prompt, truth in zip(prompts, truths, strict=True):
        result = generator.generate(prompt, 40, tree=TREES.get(tree, TreeConfig()))
        assert result.token_ids == truth[:40]
        assert result.finish == "length"
        assert result.stats.violations == []
    batch = generator.generate(prompts, 40, tree=TREES.get(tree, TreeConfig()))
    assert batch.token_ids == [truth[:40] for truth in truths]
    assert batch.stats.violations == []
    assert batch.stats.reused_tokens == sum(len(prompt) - 1 for prompt in prompts)


def test_drafts_shorten_the_work_and_rejected_ones_touch_nothing() -> None:
    rng = seeded()
    generator, prompts, _ = make(rng, count=1)
    stats = generator.generate(prompts[0], 40, tree=TREES["tree"]).stats
    assert stats.steps < 39
    assert stats.tokens_per_step == pytest.approx(39 / stats.steps)
    assert stats.drafts == stats.accepted + stats.rejected_tokens
    assert sum(stats.accepted_lengths.values()) == stats.steps
    per_token = 2 * 3 * 2 * 16 * 4  # K and V, layers, heads, channels, bytes
    assert stats.cache_bytes_avoided == stats.rejected_tokens * per_token
    assert stats.draft_bytes_written == stats.accepted * per_token > 0
    rows = len(prompts[0]) + stats.steps + stats.accepted  # of the prompt, roots, drafts
    assert stats.cache_bytes_written == rows * per_token
    told = stats.as_dict()
    assert told["accepted_lengths"] == {str(k): v for k, v in stats.accepted_lengths.items()}


def test_features_are_those_of_the_layers_asked_for() -> None:
    """Every committed row once, in order, whatever was drafted in between."""
    rng = seeded()
    model = tiny()
    prompt = random_prompt(rng)
    truth = decode_plainly(model, prompt, 48)
    kept: list[torch.Tensor] = []

    class Keeper(Oracle):
        def end(self, request) -> None:
            kept.append(torch.cat(self.features[request]))
            super().end(request)

    drafter = Keeper({tuple(prompt): truth}, rng, feature_layers=(0, 2))
    generator = Generator(model, drafter=drafter)
    result = generator.generate(prompt, 30, tree=TREES["tree"])
    outputs: list[torch.Tensor] = []
    hooks = [
        model.model.layers[i].register_forward_hook(lambda m, a, out: outputs.append(out))
        for i in (0, 2)
    ]
    with torch.no_grad():
        model(torch.tensor([prompt + result.token_ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    expected = torch.cat([out[0] for out in outputs], -1)
    rows = kept[0]
    torch.testing.assert_close(rows, expected[: len(rows)], atol=1e-4, rtol=1e-4)
    # Prompt rows are not run again when they are in the cache, but their features are told again.
    generator.generate(prompt, 30, tree=TREES["tree"])
    torch.testing.assert_close(kept[1][: len(prompt)], rows[: len(prompt)], atol=1e-4, rtol=1e-4)


def test_sequences_end_inside_an_accepted_run() -> None:
    rng = seeded()
    generator, prompts, truths = make(rng, count=2)
    for prompt, truth in zip(prompts, truths, strict=True):
        for at in (0, 1, 7, 20):
            stop = truth[at]
            first = truth.index(stop)
            result = generator.generate(prompt, 40, eos_token_id=stop, tree=TREES["chain"])
            assert result.token_ids == truth[: first + 1]
            assert result.finish == "stop"
            assert result.stats.violations == []
        for count in (1, 2, 3, 11):
            assert generator.generate(prompt, count, tree=TREES["tree"]).token_ids == truth[:count]
    several = [truths[0][5], truths[1][6]]
    batch = generator.generate(prompts, 40, eos_token_id=several)
    for got, truth in zip(batch.token_ids, truths, strict=True):
        end = min((truth.index(t) for t in several if t in truth[:40]), default=39)
        assert got == truth[: end + 1]


def test_long_chains_go_chunk_by_chunk_with_the_same_tokens() -> None:
    rng = seeded()
    generator, prompts, truths = make(rng, count=2)
    tree = TreeConfig(rows=17, depth=16, top_k=1)
    saved = 0
    for prompt, truth in zip(prompts, truths, strict=True):
        result = generator.generate(prompt, 40, tree=tree, chunk_rows=4)
        assert result.token_ids == truth[:40]
        assert max(result.stats.rows) <= 4
        assert result.stats.violations == []
        saved += result.stats.rows_saved
    assert saved > 0
    batch = generator.generate(prompts, 40, tree=tree, chunk_rows=3)
    assert batch.token_ids == [truth[:40] for truth in truths]


def test_tokens_stream_in_order_and_once() -> None:
    rng = seeded()
    generator, prompts, truths = make(rng, count=3)
    heard: list[int] = []
    generator.generate(prompts[0], 20, on_token=heard.append)
    assert heard == truths[0][:20]
    lists: list[list[int]] = [[], [], []]
    generator.generate(prompts, 20, on_token=lambda token, request: lists[request].append(token))
    assert lists == [truth[:20] for truth in truths]


def test_prompts_go_in_chunks_of_any_size() -> None:
    rng = seeded()
    for rows in (1, 7, 16, 1000):
        generator, prompts, truths = make(rng, prefill_rows=rows, page_size=4)
        batch = generator.generate(prompts, 24)
        assert batch.token_ids == [truth[:24] for truth in truths]
        assert batch.stats.violations == []


def test_a_prompt_that_goes_on_from_an_earlier_one_is_not_run_again() -> None:
    rng = seeded()
    model = tiny()
    generator = Generator(model, drafter="none", check_contract=True)
    prompt = random_prompt(rng, 20, 30)
    first = generator.generate(prompt, 12)
    longer = [*prompt, *first.token_ids, 3, 5]
    second = generator.generate(longer, 12)
    assert second.stats.reused_tokens == len(prompt) + 11  # the last token was never run
    assert second.token_ids == decode_plainly(model, longer, 12)
    other = [*prompt[:9], 1, 2]
    third = generator.generate(other, 12)
    assert third.stats.reused_tokens >= 9
    assert third.token_ids == decode_plainly(model, other, 12)
    assert second.stats.violations == third.stats.violations == []


def test_prefixes_are_shared_by_drafters_that_want_other_features() -> None:
    """What is cached serves whoever wants the same layers, or none."""
    rng = seeded()
    model, prompt = tiny(), random_prompt(rng, 20, 30)
    truths = {tuple(prompt): decode_plainly(model, prompt, 20)}
    first = Generator(model, drafter=Oracle(truths, rng, feature_layers=(0, 2)))
    reused = []
    for layers in ((0, 2), (1,), (2, 0), (), (1,)):
        drafter = Oracle(truths, rng, feature_layers=layers)
        generator = first if not reused else Generator(drafter=drafter, cache_of=first)
        result = generator.generate(prompt, 20, tree=TREES["tree"])
        assert result.token_ids == truths[tuple(prompt)]
        reused.append(result.stats.reused_tokens)
    known = len(prompt) - 1
    assert reused == [0, 0, 0, known, known]


def test_the_cache_grows_and_old_sequences_make_room() -> None:
    rng = seeded()
    model = tiny()
    generator = Generator(model, drafter="none", cache_tokens=1024)
    for _ in range(12):
        prompt = random_prompt(rng, 100, 160)
        assert generator.generate(prompt, 5).token_ids == decode_plainly(model, prompt, 5)
    with pytest.raises(NworError, match="cache_tokens: got 1024, expected"):
        generator.generate([[1] * 300] * 4, 100)
    grown = Generator(model, drafter="none")
    grown.generate([1, 2, 3], 4)
    long = random_prompt(rng, 400, 401)
    assert grown.generate([long] * 4, 9).token_ids == [decode_plainly(model, long, 9)] * 4


def test_a_prompt_that_fills_the_cache_is_found_again() -> None:
    rng = seeded()
    model = tiny()
    generator = Generator(model, drafter="none", check_contract=True)
    first, other = (random_prompt(rng, 300, 301) for _ in range(2))
    other[0] = (first[0] + 1) % model.config.vocab_size  # or a token of it would be found
    for prompt in (first, other):
        for turn in range(3):  # a cache of just this size: the prompt stays, others go
            batch = generator.generate([prompt] * 4, 9)
            assert batch.token_ids == [decode_plainly(model, prompt, 9)] * 4
            assert batch.stats.violations == []
            # In the first turn the other three take it from the first of the call.
            assert batch.stats.reused_tokens == (4 if turn else 3) * 299
    other = random_prompt(rng, 300, 301)
    batch = generator.generate([prompt, other, prompt, other], 9)
    assert batch.token_ids == [decode_plainly(model, one, 9) for one in (prompt, other)] * 2
    assert batch.stats.violations == []


def test_the_model_is_as_it_was_outside() -> None:
    model = tiny("qwen2")
    before = {name: type(module) for name, module in model.named_modules()}
    implementation = model.config._attn_implementation

    class Failing(Oracle):
        def draft(self, requests, tree):
            raise RuntimeError("injected: the drafter failed")

    generator = Generator(model, drafter=Failing({}, random.Random(0)))
    with pytest.raises(RuntimeError, match="injected"):
        generator.generate([1, 2, 3], 8, tree=TREES["chain"])
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == implementation
    stats = generator._runner.cache.allocator.stats()
    assert stats["held_slots"] == 0
    # And it can be used again.
    again = Generator(model, drafter="none")
    assert again.generate([1, 2, 3], 8).token_ids == decode_plainly(model, [1, 2, 3], 8)


def test_nothing_of_a_failed_call_stays() -> None:
    rng = seeded()
    generator, prompts, truths = make(rng, count=1)
    calls = 0

    def fail(token: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate(prompts[0], 30, on_token=fail, tree=TREES["tree"])
    result = generator.generate(prompts[0], 30, tree=TREES["tree"])
    assert result.token_ids == truths[0][:30]
    assert result.stats.violations == []


def test_a_cache_that_cannot_grow_fails_one_call_and_not_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny()
    generator = Generator(model, drafter="none")
    generator.generate([1, 2, 3], 4)

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError("injected: no room for a larger cache")

    for use in (lambda: generator.generate([1, 2, 3], 4), generator.forget):
        with monkeypatch.context() as patched:
            patched.setattr(runner, "PagedCache", no_memory)
            with pytest.raises(MemoryError, match="injected"):
                generator.generate([[1] * 400] * 8, 9)
        use()
        assert generator.generate([1, 2, 3], 4).token_ids == decode_plainly(model, [1, 2, 3], 4)


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_measurement_that_was_interrupted_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator, _, _ = make(seeded(), count=1)
    allocator = generator._runner.cache.allocator
    before = allocator.stats()
    for place in ("commit", "_step"):
        with monkeypatch.context() as patched:
            patched.setattr(Round, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                _ = generator.row_costs
        assert allocator.stats() == before
    assert generator.row_costs[1] > 0


def test_the_curve_of_costs_is_there_to_look_at() -> None:
    generator, _, _ = make(seeded(), count=1)
    costs = generator.row_costs
    assert list(costs) == sorted(costs)
    assert costs[1] > 0
    assert generator.row_costs == costs


def test_costs_are_measured_also_where_old_sequences_fill_the_cache() -> None:
    rng = seeded()
    generator = Generator(tiny(), drafter="none", page_size=1, cache_tokens=1024)
    for first in (1, 2, 3):
        generator.generate([first, *random_prompt(rng, 439, 440)], 60)
    assert generator._runner.cache.allocator.stats()["free_slots"] < 32
    assert generator.row_costs[32] > 0


def test_what_was_learnt_about_rows_is_shared_with_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = []
    measure = Generator._measure
    monkeypatch.setattr(Generator, "_measure", lambda self: measured.append(self) or measure(self))
    first = Generator(tiny(), drafter="ngram")
    alike = Generator(drafter="ngram", cache_of=first)
    other = Generator(drafter="none", cache_of=first)
    own = [Generator(drafter=Oracle({}, random.Random(0)), cache_of=first) for _ in range(2)]
    first.generate([1, 2, 3, 1, 2, 3], 12)
    assert alike._rows_chooser() is first._rows_chooser()
    assert alike._rows_chooser()._choice._steps > 0  # of the first
    strangers = [one._rows_chooser() for one in (first, other, *own)]
    assert len({id(one) for one in strangers}) == 4
    assert all(one.row_costs == first.row_costs for one in (alike, other, *own))
    assert measured == [first]
    assert Generator(tiny(), drafter="ngram")._rows_chooser() is not first._rows_chooser()


def test_a_round_that_does_not_fit_staging_is_refused_by_name() -> None:
    rng = seeded()
    generator, prompts, _ = make(rng, count=1, nwor=NworConfig(max_staging_bytes=1000))
    with pytest.raises(NworError, match="max_staging_bytes"):
        generator.generate(prompts[0], 10, tree=TREES["tree"])


def test_ids_are_taken_in_every_form() -> None:
    model = tiny()
    generator = Generator(model, drafter="none")
    truth = decode_plainly(model, [5, 6, 7], 6)
    for form in ([5, 6, 7], torch.tensor([5, 6, 7]), torch.tensor([[5, 6, 7]])):
        assert generator.generate(form, 6).token_ids == truth
    two = generator.generate(torch.tensor([[5, 6, 7], [5, 6, 7]]), 6)
    assert two.token_ids == [truth, truth]
    assert generator.generate([torch.tensor([5, 6, 7]), [5, 6, 7]], 6).token_ids == [truth, truth]
    number = np.int64
    for form in ([number(5), number(6), number(7)], np.array([5, 6, 7], dtype=np.int32)):
        assert generator.generate(form, 6).token_ids == truth
    assert generator.generate([[number(5), 6, 7]], 6).token_ids == [truth]


def test_numbers_are_taken_in_every_form() -> None:
    model, number = tiny(), np.int64
    options = {"page_size": number(8), "prefill_rows": number(2), "cache_tokens": number(1024)}
    generator = Generator(model, drafter="ngram", **options)
    truth = decode_plainly(model, [5, 6, 7], 6)
    result = generator.generate([5, 6, 7], number(6), top_k=number(0), chunk_rows=number(0))
    assert result.token_ids == truth
    json.dumps(result.stats.as_dict())
    stop = truth[2]
    end = truth.index(stop) + 1
    for form in (stop, [stop], number(stop), torch.tensor(stop), torch.tensor([stop, -1])):
        result = generator.generate([5, 6, 7], 6, eos_token_id=form)
        assert (result.token_ids, result.finish) == (truth[:end], "stop")


def test_an_end_of_the_models_own_that_it_cannot_say_is_none() -> None:
    model = copy.deepcopy(tiny())
    truth = decode_plainly(model, [1, 2], 3)
    model.config.eos_token_id = truth[0]
    generator = Generator(model, drafter="none")
    assert generator.generate([1, 2], 3).finish == "stop"
    for told in ([96, 50256], -1):
        model.generation_config.eos_token_id = told
        assert generator.generate([1, 2], 3).token_ids == truth


@pytest.mark.parametrize("layers", [(), (1,)])
def test_the_first_look_at_a_prompt_belongs_to_the_prompt(layers: tuple[int, ...]) -> None:
    """Where the head reads hundreds of entries, which no step should pay for."""
    rng, asked = seeded(), []

    class Asked(Oracle):
        def draft(self, requests, tree):
            asked.append((len(requests), tree.rows))
            return super().draft(requests, tree)

    prompts = [random_prompt(rng, 10, 20) for _ in range(3)]
    truths = {tuple(p): decode_plainly(tiny(), p, 6) for p in prompts}
    generator = Generator(tiny(), drafter=Asked(truths, rng, feature_layers=layers))
    result = generator.generate(prompts, 6, tree=TreeConfig(rows=5, depth=4, top_k=1))
    assert asked[:4] == [(1, 2), (1, 2), (1, 2), (3, 5)]
    assert result.token_ids == [truths[tuple(prompt)] for prompt in prompts]
    asked.clear()
    generator.generate(prompts, 1)
    assert asked == []
