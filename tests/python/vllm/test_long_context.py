"""Pure parts of partial verification in vLLM: the policy, what is refused at start."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from nwor_specpv.config import load_config
from nwor_specpv.errors import NworError
from nwor_specpv.vllm.settings import read_settings
from nwor_specpv.vllm.specpv.policy import (
    DraftOutlook,
    StepCosts,
    choose_passes,
    expected_accepted,
    fit_costs,
)
from nwor_specpv.vllm.specpv.publishing import full_tokens
from nwor_specpv.vllm.specpv.rules import (
    DRAFTER,
    SCHEDULERS,
    LongContext,
    describe,
    has_guesses_alone,
    judge,
    refusals,
)

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))


def test_costs_are_fitted_and_never_negative() -> None:
    costs = fit_costs(one_row=1.0, many_rows=1.7, rows=8, with_view=3.0, tokens=1000)
    assert costs.run(1, 0) == pytest.approx(1.0)
    assert costs.run(8, 0) == pytest.approx(1.7)
    assert costs.run(1, 1000) == pytest.approx(3.0)
    noisy = fit_costs(one_row=1.0, many_rows=0.9, rows=8, with_view=0.8, tokens=10)
    assert (noisy.per_row, noisy.per_token) == (0, 0)
    # Another process had the processor while many rows were measured.
    held_up = fit_costs(one_row=1.0, many_rows=29.0, rows=8, with_view=1.0, tokens=10)
    assert held_up.run(1, 0) == pytest.approx(1.0)
    assert min(held_up.base, held_up.per_row) >= 0


def test_expected_accepted_is_the_mean_of_the_chain() -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    for agreement, drafts in ((0.9, 16), (0.5, 4), (1.0, 7), (0.0, 3)):
        total = 0
        for _ in range(20_000):
            for _ in range(drafts):
                if rng.random() >= agreement:
                    break
                total += 1
        assert expected_accepted(agreement, drafts) == pytest.approx(total / 20_000, rel=0.05)


# An 8B model on a large GPU: weights 3.4 ms, K/V at 4.4 TB/s, 131072 bytes a token.
COSTS = StepCosts(base=3.4e-3, per_row=5e-6, per_token=131072 / 4.4e12, full_extra=0.3e-3)
OUTLOOK = DraftOutlook(
    contexts=[32768] * 8,
    view_tokens=4256,
    others=0,
    num_others=0,
    rows_per_pass=4,
    tokens_per_pass=3.0,
    agreement=0.95,
    lookup_agreement=0.7,
    lookup_tokens=3.0,
    tokens_behind=3.0,
    max_drafts=20,
)


@pytest.mark.parametrize(
    ("change", "pays"),
    [
        ({}, True),
        ({"contexts": [122_880] * 6}, True),
        ({"contexts": [32768] * 24}, True),
        ({"contexts": [4400]}, False),  # a view as long as the context
        ({"agreement": 0.2}, False),
        ({"contexts": []}, False),
    ],
)
def test_passes_where_they_pay(change: dict, pays: bool) -> None:
    passes = choose_passes(COSTS, replace(OUTLOOK, **change))
    assert (passes > 0) is pays
    assert passes * OUTLOOK.tokens_per_pass <= OUTLOOK.max_drafts + OUTLOOK.tokens_per_pass


def test_lookups_behind_the_chain_count() -> None:
    """Chains of fewer passes leave room for more of them, and rightly guessed they are free."""
    known = replace(OUTLOOK, max_drafts=9, agreement=0.9)
    without = replace(known, tokens_behind=0.0)
    assert choose_passes(COSTS, without) == 3, "a chain as long as there is room"
    assert 0 < choose_passes(COSTS, known) < 3


def test_longer_contexts_and_better_agreement_want_more_passes() -> None:
    by_context = [
        choose_passes(COSTS, replace(OUTLOOK, contexts=[n] * 8)) for n in (8192, 32768, 131_072)
    ]
    by_agreement = [choose_passes(COSTS, replace(OUTLOOK, agreement=p)) for p in (0.5, 0.9, 0.99)]
    for passes in (by_context, by_agreement):
        assert passes == sorted(passes)
        assert passes[0] < passes[-1]


GOOD = LongContext(
    drafter="custom_class", drafter_class=DRAFTER, num_drafts=16, max_model_len=32768, cpu=True
)
LOSSLESS = {"enable_specpv": True, "specpv_mode": "lossless"}
REFRESH = {"enable_specpv": True, "specpv_mode": "refresh"}
CACHED = {"prefix_caching": True, "drafter_class": "e"}
HEAD = {"drafter": "eagle3", "drafter_class": "h", "runner_v2": True, "async_scheduling": True}
HEAD |= {"cpu": False}
LOOKUPS = HEAD | {"drafter": "ngram_gpu", "drafter_class": "ngram_gpu"}


@pytest.mark.parametrize("who", [HEAD, LOOKUPS])
def test_short_contexts_have_guesses_alone(who: dict) -> None:
    """Nobody has asked for views of this size: they are left out on model runner V2."""
    settings = load_config(LOSSLESS)
    for tokens, alone in ((512, True), (4256, True), (4257, False)):
        setup = replace(GOOD, **who, max_model_len=tokens)
        assert refusals(settings, setup, None) == []
        assert has_guesses_alone(settings, setup) is alone
    short = replace(GOOD, max_model_len=512)
    assert not has_guesses_alone(settings, short)  # model runner V1
    assert not has_guesses_alone(load_config(REFRESH), replace(short, **who))


def test_a_good_set_up_is_let_in() -> None:
    assert refusals(load_config(LOSSLESS), GOOD, None) == []
    ngram = replace(GOOD, drafter="ngram", drafter_class="ngram", runner_v2=True)
    assert refusals(load_config(REFRESH), ngram, None) == []
    assert refusals(load_config(LOSSLESS), replace(GOOD, **HEAD), None) == []
    assert refusals(load_config(LOSSLESS), replace(GOOD, **LOOKUPS), None) == []
    ranges = replace(ngram, drafts_by_batch_size=True)  # vLLM's own choice stays
    assert refusals(load_config(REFRESH), ranges, None) == []
    for kind in (False, True):
        cached = replace(GOOD, **CACHED, async_scheduling=kind, caps_published=kind)
        assert refusals(load_config(REFRESH), cached, None) == []


@pytest.mark.parametrize(
    ("settings", "change", "reason", "remedy"),
    [
        (LOSSLESS, {"drafter_class": "eagle"}, "in which the target drafts itself", DRAFTER),
        (LOSSLESS, HEAD | {"runner_v2": False}, "has chosen V1", "VLLM_USE_V2_MODEL_RUNNER=1"),
        (LOSSLESS, LOOKUPS | {"runner_v2": False}, "has chosen V1", "VLLM_USE_V2_MODEL_RUNNER=1"),
        (
            LOSSLESS,
            LOOKUPS | {"runner_v2": False, "cpu": True},
            "in which the target drafts itself",
            DRAFTER,
        ),
        (LOSSLESS, {"cpu": False}, "slower than no drafting", '"method": "ngram_gpu"'),
        (
            LOSSLESS,
            HEAD | {"drafter": "ngram"},
            "in which the target drafts itself",
            '"method": "ngram_gpu"',
        ),
        (LOSSLESS, LOOKUPS | {"num_drafts": 4}, "a lookup alone drafts 4", "specpv_draft_lookup"),
        (LOSSLESS, LOOKUPS | {"expert_balancing": True}, "expert load", "--enable-eplb"),
        (LOSSLESS, HEAD | {"drafter": "mtp"}, "in which the target drafts itself", "'eagle3'"),
        (LOSSLESS, HEAD | {"num_drafts": 4}, "the head alone drafts 4", "num_speculative_tokens"),
        (LOSSLESS, HEAD | {"data_parallel": 2}, "data parallelism of 2", "--data-parallel-size 1"),
        (LOSSLESS, HEAD | {"lora": True}, "LoRA", "--enable-lora"),
        (
            LOSSLESS,
            HEAD | {"drafts_by_batch_size": True},
            "num_speculative_tokens_per_batch_size",
            "LongContextScheduler",
        ),
        (LOSSLESS, {"runner_v2": True}, "model runner V2", "VLLM_USE_V2_MODEL_RUNNER=0"),
        (LOSSLESS, {"async_scheduling": True}, "asynchronous", "--no-async-scheduling"),
        (LOSSLESS, {"data_parallel": 2}, "data parallelism of 2", "--data-parallel-size 1"),
        (LOSSLESS, {"lora": True}, "LoRA", "--enable-lora"),
        (LOSSLESS, {"kv_connector": True}, "not tried with views", "--kv-transfer-config"),
        (REFRESH, {"kv_connector": True, "drafter_class": "e"}, "K/V of partial steps", "--kv-tr"),
        (LOSSLESS, {"multimodal": True}, "multimodal", "without enable_specpv"),
        (
            LOSSLESS,
            {"cache_dtype": "fp8_e5m2"},
            "a KV cache of fp8_e5m2",
            "--kv-cache-dtype fp8 or auto",
        ),
        (LOSSLESS, {"num_drafts": 200}, "200 speculative tokens", "128 or fewer"),
        (
            LOSSLESS,
            {"page_size": 24},
            "specpv_block_size 16 does not divide pages of 24",
            "--block-size",
        ),
        (
            REFRESH,
            {"page_size": 8, "drafter_class": "e"},
            "does not divide pages of 8 tokens",
            "divides them",
        ),
        (LOSSLESS, {"max_model_len": 4096}, "view of 4256 tokens", "a smaller view"),
        (
            LOSSLESS | {"specpv_n_window_blocks": 9},
            LOOKUPS | {"max_model_len": 4096},
            "view of 4272 tokens",
            "longer --max-model-len",
        ),
        (LOSSLESS | {"specpv_storage": "compact"}, {}, "compact", "'paged'"),
        (LOSSLESS | {"specpv_budget": "adaptive"}, {}, "adaptive", "'fixed'"),
        (LOSSLESS | {"specpv_mode": "rectify"}, {}, "no token twice", "'lossless'"),
        (REFRESH, CACHED, "prefix caching", "--no-enable"),
        (REFRESH, CACHED, "published to other requests", SCHEDULERS[False]),
        (REFRESH, CACHED | {"async_scheduling": True}, "to other requests", SCHEDULERS[True]),
        (REFRESH, CACHED | {"caps_published": True}, "for synchronous", SCHEDULERS[False]),
        (
            REFRESH,
            CACHED | {"caps_published": False, "async_scheduling": True},
            "not the one for asynchronous scheduling",
            SCHEDULERS[True],
        ),
        (REFRESH, {}, "drafts for full steps", "'lossless'"),
    ],
)
def test_what_is_refused_says_why_and_what_to_do(
    settings: dict, change: dict, reason: str, remedy: str
) -> None:
    found = refusals(load_config(settings), replace(GOOD, **change), None)
    assert len(found) == 1
    assert reason in found[0].reason
    assert remedy in found[0].remedy
    with pytest.raises(NworError, match="enable_specpv"):
        judge(load_config(settings), replace(GOOD, **change), None)


@pytest.mark.parametrize(
    ("ranges", "told"), [(None, False), ([], False), ([(1, 8, 16), (9, 64, 4)], True)]
)
def test_numbers_of_drafts_by_batch_size_are_described(ranges: list | None, told: bool) -> None:
    speculative = SimpleNamespace(
        method="eagle3",
        model="h",
        num_speculative_tokens=16,
        num_speculative_tokens_per_batch_size=ranges,
    )
    config = SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(
            is_multimodal_model=False, uses_mrope=False, max_model_len=32768
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=True),
        cache_config=SimpleNamespace(
            enable_prefix_caching=False, cache_dtype="auto", block_size=None
        ),
        parallel_config=SimpleNamespace(data_parallel_size=1, enable_eplb=False),
        device_config=SimpleNamespace(device_type="cuda"),
        lora_config=None,
        kv_transfer_config=None,
        use_v2_model_runner=True,
    )
    found = describe(config)
    assert found == replace(GOOD, **HEAD, drafts_by_batch_size=told)
    assert len(refusals(load_config(LOSSLESS), found, None)) == told
    config.speculative_config = None
    assert not describe(config).drafts_by_batch_size


def test_what_is_published_is_known_from_settings() -> None:
    """The view, or the threshold where that is longer; less what drafts in flight may pretend."""
    view = full_tokens(load_config(REFRESH), 4, 1)
    assert view == load_config(REFRESH).specpv().budget(5).static_tokens > 4000
    assert full_tokens(load_config(REFRESH), 4, 2) == view - 4
    later = load_config(REFRESH | {"specpv_partial_threshold": 9000})
    assert full_tokens(later, 4, 1) == 9000
    tiny = {f"specpv_n_{part}_blocks": 0 for part in ("sink", "retrieval")}
    tiny |= {"specpv_n_window_blocks": 1}
    assert full_tokens(load_config(REFRESH | tiny), 20, 2) == 0


def test_staging_that_is_off_is_a_reason() -> None:
    (found,) = refusals(load_config(LOSSLESS), GOOD, "cascade attention")
    assert "cascade attention" in found.reason


def test_lossless_unless_told_otherwise() -> None:
    assert read_settings({"nwor_specpv": {"enable_specpv": True}}, {}).specpv_mode == "lossless"
    assert read_settings(None, {}).specpv_mode == "lossless"
    told = {"nwor_specpv": {"specpv_mode": "refresh"}}
    assert read_settings(told, {}).specpv_mode == "refresh"
    env = {"NWOR_SPECPV_MODE": "rectify"}
    assert read_settings({"nwor_specpv": {}}, env).specpv_mode == "rectify"
