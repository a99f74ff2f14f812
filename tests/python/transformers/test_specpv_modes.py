"""Generator with partial verification: what each mode promises."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import pytest
import torch

from nwor_specpv import Metrics, NworError, SpecPVConfig
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.transformers import Generator, runner
from tests.python.specpv.contexts import seeded
from tests.python.transformers.tiny_models import Oracle, decode_plainly, random_prompt, tiny

TREE = TreeConfig(rows=8, depth=4, top_k=2)


def configured(mode: str, **values: object) -> SpecPVConfig:
    sizes = {
        "enable_specpv": True,
        "specpv_mode": mode,
        "specpv_block_size": 8,
        "specpv_n_sink_blocks": 1,
        "specpv_n_retrieval_blocks": 4,
        "specpv_n_window_blocks": 2,
        "specpv_n_spec_tokens_buf": 6,
    }
    return SpecPVConfig(**(sizes | values))


def make(rng: random.Random, config: SpecPVConfig, count: int = 2, pace: bool = False, **options):
    model = tiny()
    prompts = [random_prompt(rng, 70, 120) for _ in range(count)]
    truths = {tuple(p): decode_plainly(model, p, 40) for p in prompts}
    drafter = Oracle(truths, rng, feature_layers=(1,), **options)
    generator = Generator(model, drafter=drafter, specpv=config, check_contract=True, pace=pace)
    return generator, prompts, [truths[tuple(p)] for p in prompts]


@pytest.mark.parametrize("can_retract", [True, False])
def test_lossless_equals_plain_decoding(can_retract: bool) -> None:
    rng = seeded()
    generator, prompts, truths = make(rng, configured("lossless"), can_retract=can_retract)
    result = generator.generate(prompts[0], 24, tree=TREE)
    assert result.token_ids == truths[0][:24]
    assert result.stats.step_kinds["partial"] > 0
    assert result.stats.cut_tokens > 0  # a random model's attention is everywhere: views miss it
    assert result.stats.violations == []
    batch = generator.generate(prompts, 16, tree=TREE)
    assert batch.token_ids == [truth[:16] for truth in truths]
    assert batch.stats.violations == []


def test_lossless_ends_where_plain_decoding_ends() -> None:
    rng = seeded()
    generator, prompts, truths = make(rng, configured("lossless"), count=1)
    heard: list[int] = []
    stop = truths[0][9]
    end = truths[0].index(stop)
    result = generator.generate(prompts[0], 24, eos_token_id=stop, tree=TREE, on_token=heard.append)
    assert result.token_ids == heard == truths[0][: end + 1]
    assert result.finish == "stop"
    assert len(result.depths) == len(result.token_ids)


def test_lossless_sampling_ends_inside_an_accepted_path() -> None:
    """A model that counts, whatever it sees: views miss nothing, every draft is accepted."""
    rng = seeded()
    model = copy.deepcopy(tiny())
    for layer in model.model.layers:
        for zeroed in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.zeros_(zeroed.weight)
    model.lm_head.weight.data = model.model.embed_tokens.weight.data.roll(1, 0)
    prompt = [*random_prompt(rng, 70, 120), 10]
    truth = decode_plainly(model, prompt, 40)
    assert truth == list(range(11, 51))
    drafter = Oracle({tuple(prompt): truth}, rng, right=1.0)
    generator = Generator(model, drafter=drafter, specpv=configured("lossless"), pace=False)
    tree, partial = TreeConfig(rows=5, depth=4, top_k=1), 0
    for end in range(16):
        result = generator.generate(
            prompt, 40, temperature=1.0, top_k=1, seed=3, eos_token_id=truth[end], tree=tree
        )
        assert result.token_ids == truth[: end + 1]
        assert result.finish == "stop"
        partial += result.stats.step_kinds["partial"] > 0
    assert partial > tree.rows  # the stop was at every place of a partial step's path


@pytest.mark.parametrize(
    ("mode", "pace"),
    [("rectify", False), ("refresh", False), ("lossless", False), ("lossless", True)],
)
def test_a_view_that_covers_the_context_changes_nothing(mode: str, pace: bool) -> None:
    rng = seeded()
    config = configured(mode, specpv_n_retrieval_blocks=40)
    generator, prompts, truths = make(rng, config, pace=pace)
    batch = generator.generate(prompts, 24, tree=TREE)
    assert batch.token_ids == [truth[:24] for truth in truths]
    assert batch.stats.violations == []


def test_rectify_puts_the_cache_right_and_counts_drift() -> None:
    """After the call the kept prefix is what a plain pass over the same tokens leaves."""
    rng = seeded()
    generator, prompts, _ = make(rng, configured("rectify"), count=1)
    result = generator.generate(prompts[0], 40, tree=TREE)
    stats = result.stats
    assert stats.violations == []
    assert stats.step_kinds["partial"] > stats.step_kinds["full_refresh"] > 0
    assert stats.rechecked_tokens > 0
    assert stats.disagreed_tokens > 0
    assert 0 < stats.view_coverage < 1
    (kept,) = generator._kept._kept.values()
    plain = Generator(tiny(), drafter="none")
    plain.generate(kept.tokens, 1)
    for ours, theirs in zip(
        _cached(generator, kept.key, len(kept.tokens) - 1),
        _cached(plain, next(iter(plain._kept._kept)), len(kept.tokens) - 1),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def _cached(generator: Generator, key: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    cache = generator._runner.cache
    slots = cache.allocator.slots(key, 0, count)
    return tuple(side.flatten(1, 2)[:, slots] for side in (cache.keys, cache.values))


def test_the_same_seed_gives_the_same_text_in_lossless_mode() -> None:
    texts = []
    for _ in range(2):
        rng = random.Random(4)
        generator, prompts, _ = make(rng, configured("lossless"))
        result = generator.generate(prompts, 12, temperature=0.8, seed=11, tree=TREE)
        assert result.stats.violations == []
        texts.append(result.token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("shared", [False, True])
def test_a_cache_with_views_is_gone_before_a_larger_one_is_made(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    generator, prompts, truths = make(seeded(), configured("lossless"), count=1)
    generator.generate(prompts[0], 24, tree=TREE)
    before, made, paged = weakref.ref(generator._runner.cache), [], runner.PagedCache

    def make_cache(*arguments: object, **options: object) -> object:
        made.append(before())
        return paged(*arguments, **options)

    monkeypatch.setattr(runner, "PagedCache", make_cache)
    growing = Generator(drafter="none", cache_of=generator) if shared else generator
    growing.generate([[1] * 100] * 16, 4)
    assert made == [None]
    result = generator.generate(prompts[0], 24, tree=TREE)
    assert result.token_ids == truths[0][:24]
    assert result.stats.step_kinds["partial"] > 0


def test_models_with_windows_are_refused() -> None:
    with pytest.raises(NworError, match="specpv: got a model with sliding-window layers"):
        Generator(tiny("mistral"), specpv=configured("rectify"), drafter="none")


@pytest.mark.parametrize(("mode", "lossy"), [("rectify", 1), ("refresh", 1), ("lossless", 0)])
def test_metrics_tell_of_generators_that_are_not_lossless(mode: str, lossy: int) -> None:
    before = Metrics().snapshot()["specpv_lossy_engines"]
    generator, prompts, _ = make(seeded(), configured(mode), count=1)
    assert Metrics().snapshot()["specpv_lossy_engines"] - before == lossy
    generator.generate(prompts[0], 4, tree=TREE)
    del generator
    gc.collect()
    assert Metrics().snapshot()["specpv_lossy_engines"] == before
