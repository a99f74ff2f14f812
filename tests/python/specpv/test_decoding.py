"""Whole generations with a toy model: what each mode promises, on the host of toy_model.py."""

from __future__ import annotations

import math
import random

import pytest
import torch

from nwor_specpv import Metrics, NworError, SpecPVConfig
from tests.python.specpv.contexts import of_pages, seeded
from tests.python.specpv.toy_model import (
    DIM,
    KV_HEADS,
    LAYERS,
    VOCAB,
    Host,
    Request,
    Weights,
    decode_plainly,
    plain_kv,
)


def configured(rng: random.Random, **values: object) -> SpecPVConfig:
    defaults = {
        "enable_specpv": True,
        "specpv_block_size": rng.choice([4, 8]),
        "specpv_n_sink_blocks": 1,
        "specpv_n_retrieval_blocks": rng.randrange(1, 4),
        "specpv_n_window_blocks": 1,
        "specpv_n_spec_tokens_buf": rng.randrange(2, 10),
        "specpv_selection": rng.choice(["per_head", "shared"]),
        "specpv_selector": rng.choice(["specpv", "quest", "streaming", "sliding"]),
    }
    return SpecPVConfig(**(defaults | values))


def prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Each longer than the longest view of `configured`, 40 tokens."""
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(44, 70))] for _ in range(count)]


def start(rng: random.Random, config: SpecPVConfig, count: int = 2) -> Host:
    host = Host(Weights(rng.randrange(1 << 30)), config, count, max_tokens=160)
    for prompt in prompts(rng, count):
        host.add(prompt, 24)
    return host


def tokens_in_cache(host: Host, request: Request, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.tensor([host.slot(request, i) for i in range(count)])
    flat = (host.keys.flatten(1, 2), host.values.flatten(1, 2))
    return flat[0][:, at], flat[1][:, at]


def test_lossless_equals_plain_decoding() -> None:
    rng = seeded()
    host = start(rng, configured(rng, specpv_mode="lossless"))
    plain = [decode_plainly(host.w, r.tokens, 24) for r in host.requests]
    assert host.decode(24, rng) == plain
    assert host.kinds["partial"] > 0
    assert host.kinds["full_refresh"] > 0


def test_partial_attention_alone_would_not_be_lossless() -> None:
    """The test above can fail: without confirmation some token differs, sooner or later."""
    rng = random.Random(3)
    for seed in range(20):
        torch.manual_seed(seed)
        host = start(rng, configured(rng, specpv_mode="rectify", specpv_selector="sliding"))
        plain = [decode_plainly(host.w, r.tokens, 24) for r in host.requests]
        if host.decode(24, rng) != plain:
            return
    pytest.fail("partial attention never made a difference")


@pytest.mark.parametrize("mode", ["rectify", "lossless"])
def test_after_a_full_refresh_the_cache_is_that_of_a_plain_pass(mode: str) -> None:
    rng = seeded()
    host = start(rng, configured(rng, specpv_mode=mode))
    checked = 0

    def check(host: Host, request: Request) -> None:
        nonlocal checked
        if request.decision.kind == "partial":
            return
        length = request.cache.committed_len
        _, keys, values = plain_kv(host.w, request.tokens[:length])
        ours = tokens_in_cache(host, request, length)
        assert torch.allclose(ours[0], keys, atol=1e-4)
        assert torch.allclose(ours[1], values, atol=1e-4)
        checked += request.decision.refed_rows > 0

    host.after_step = check
    host.decode(24, rng)
    assert checked > 0


def test_the_refresh_mode_keeps_the_tail_as_it_was_computed() -> None:
    rng = seeded()
    host = start(rng, configured(rng, specpv_mode="refresh", specpv_selector="streaming"))
    kept: dict[int, tuple] = {}

    def check(host: Host, request: Request) -> None:
        cache, before = request.cache, kept.get(id(request))
        if before is not None:
            now = tokens_in_cache(host, request, before[0].shape[1])
            assert torch.equal(now[0], before[0])
            assert torch.equal(now[1], before[1])
        kept[id(request)] = tokens_in_cache(host, request, cache.committed_len)

    host.after_step = check
    host.decode(24, rng)
    assert host.kinds["partial"] > 0


def test_partial_steps_leave_everything_before_the_tail_alone() -> None:
    rng = seeded()
    host = start(rng, configured(rng), count=3)
    before: dict[int, tuple] = {}

    def check(host: Host, request: Request) -> None:
        full = request.cache.full_len
        if request.decision.kind == "partial":
            now = tokens_in_cache(host, request, full)
            assert torch.equal(now[0], before[id(request)][0])
            assert torch.equal(now[1], before[id(request)][1])
        before[id(request)] = tokens_in_cache(host, request, full)

    host.after_step = check
    host.decode(24, rng)
    assert host.kinds["partial"] > 0


def check_summaries(host: Host, request: Request) -> int:
    """Of verified tokens only, and as they would be from scratch. Returns how many there are."""
    store, cache, size = host.store, request.cache, host.store.budget.block_size
    sink = store.budget.sink_blocks * size
    keys = tokens_in_cache(host, request, cache.full_len)[0]
    for block in range(cache.summarized_blocks):
        first = sink + block * size
        assert first + size <= cache.full_len
        rows = keys[:, first : first + size]
        for kept, wanted in ((store.kmax, rows.amax(1)), (store.kmin, rows.amin(1))):
            found = of_pages(kept, torch.tensor(request.pages), store.budget.sink_blocks + block, 1)
            assert torch.equal(found[:, 0], wanted)
    return cache.summarized_blocks


def test_summaries_hold_verified_tokens_only_and_equal_those_from_scratch() -> None:
    rng = seeded()
    host = start(rng, configured(rng, specpv_selector="specpv"))
    checked = 0

    def check(host: Host, request: Request) -> None:
        nonlocal checked
        checked += check_summaries(host, request)

    host.after_step = check
    host.decode(24, rng)
    assert checked > 0


def test_drift_is_what_full_attention_would_have_chosen_differently() -> None:
    rng = seeded()
    host = start(rng, configured(rng, specpv_selector="sliding"), count=1)
    (request,) = host.requests
    before = Metrics().snapshot()
    expected = looked_at = 0

    def check(host: Host, request: Request) -> None:
        nonlocal expected, looked_at
        decision = request.decision
        looked_at += decision.refed_rows
        if decision.refed_rows:
            logits = plain_kv(host.w, request.tokens[: decision.committed_len])[0]
            told = logits.argmax(-1).tolist()
            for position in range(decision.full_len, decision.committed_len):
                expected += told[position] != request.tokens[position + 1]

    host.after_step = check
    host.decode(24, rng)
    assert looked_at > 0
    assert (request.cache.rechecked_tokens, request.cache.disagreed_tokens) == (looked_at, expected)
    after = Metrics().snapshot()
    for name, grown in (("rechecked", looked_at), ("disagreed", expected)):
        key = f"specpv_{name}_tokens_total"
        assert after[key] - before[key] == grown


def test_what_is_read_and_what_full_steps_would_have_read_is_counted() -> None:
    rng = seeded()
    host = start(rng, configured(rng, specpv_selector="specpv"), count=2)
    before = Metrics().snapshot()
    per_token = 2 * LAYERS * KV_HEADS * DIM * 4
    read = full = refreshes = partial = 0

    def check(host: Host, request: Request) -> None:
        nonlocal read, full, refreshes, partial
        decision = request.decision
        is_partial = decision.kind == "partial"
        read += per_token * (decision.view_tokens if is_partial else decision.prefix_len)
        full += per_token * decision.committed_len
        refreshes += decision.kind == "full_refresh"
        partial += is_partial

    host.after_step = check
    host.decode(24, rng)
    after = Metrics().snapshot()

    def grown(name: str) -> int:
        return after[name] - before[name]

    assert grown("specpv_kv_bytes_read_total") == read < full
    assert grown("specpv_kv_bytes_full_total") == full
    assert grown("specpv_partial_steps_total") == partial > 0
    # A layer's refresh is timed when a request refreshes, and then once for the batch.
    timed = grown("specpv_refresh_seconds_count")
    assert 0 < timed <= LAYERS * refreshes
    assert timed % LAYERS == 0
    assert "specpv_refresh_seconds_bucket" in Metrics().render()


def test_a_request_that_goes_frees_its_row_at_once() -> None:
    rng = seeded()
    host = start(rng, configured(rng), count=2)
    assert host.store.free_rows == 0
    assert host.store.open() is None
    host.step([[], []])
    row = host.requests[0].cache.row
    del host.requests[0]
    assert host.store.free_rows == 1
    again = host.store.open()
    assert again.row == row
    assert not again.selected


def test_a_failed_refresh_makes_the_next_step_full() -> None:
    rng = seeded()
    host = start(rng, configured(rng, specpv_selector="specpv"), count=1)
    (request,) = host.requests
    before = Metrics().snapshot()["specpv_full_steps_total"].get("refresh_failure", 0)
    refresh = host.store.refresh_layer
    host.store.refresh_layer = lambda *arguments: None  # a host that forgets
    host.step([[1, 2]])
    assert request.decision.trigger == "first"
    assert not request.cache.selected
    host.store.begin([(request.cache, host.policy.decide(request.cache, 1))])
    with pytest.raises(NworError, match="query"):
        refresh(0, torch.zeros(1), torch.zeros(1, 20, dtype=torch.int32))
    host.store.refresh_layer = refresh
    host.step([[]])
    assert request.decision.trigger == "refresh_failure"
    assert request.cache.selected
    assert check_summaries(host, request) > 0  # none is believed that was to be made and was not
    after = Metrics().snapshot()["specpv_full_steps_total"]["refresh_failure"]
    assert after == before + 1
    host.step([[]])
    assert request.decision.kind == "partial"


def test_blocks_of_a_step_that_was_begun_and_not_run_are_not_taken_for_summarised() -> None:
    rng = seeded()
    host = start(rng, configured(rng, specpv_selector="specpv"), count=1)
    (request,) = host.requests
    host.store.kmax.fill_(math.nan)
    host.store.kmin.fill_(math.nan)
    host.store.begin([(request.cache, host.policy.decide(request.cache, 1))])
    assert request.cache.summarized_blocks == 0
    host.step([[]])
    assert request.decision.kind == "full_refresh"
    assert check_summaries(host, request) > 0
    # Nor those of a step whose last layer was left out.
    refresh = host.store.refresh_layer
    request.cache.require_full()
    known = request.cache.summarized_blocks
    host.store.refresh_layer = lambda layer, *given: refresh(layer, *given) if layer == 0 else None
    host.step([[]])
    assert (request.cache.required, request.cache.summarized_blocks) == ("refresh_failure", known)


def test_compact_storage_decodes_as_paged_storage_does() -> None:
    rng = seeded()
    seed, story = rng.randrange(1 << 30), rng.randrange(1 << 30)
    shown = []
    for storage in ("paged", "compact"):
        rng = random.Random(story)
        torch.manual_seed(seed)
        host = start(rng, configured(rng, specpv_storage=storage))
        shown.append(host.decode(20, rng))
    assert shown[0] == shown[1]
    assert host.kinds["partial"] > 0


def test_accepted_rows_reach_compact_views_from_the_commit_and_not_by_a_copy() -> None:
    rng = seeded()
    config = configured(rng, specpv_storage="compact", specpv_selector="specpv")
    host = start(rng, config, count=2)
    refreshed: set[int] = set()
    gathered = 0
    gather = host.compact._gather

    def watch() -> None:
        """Tokens are copied after a refresh; in all later steps the view is there already."""
        nonlocal gathered
        held = host.compact._held.tolist()
        lens = host.compact.view(0).lens.tolist()
        for place, request in enumerate(host.requests):
            if request.decision.kind != "partial":
                refreshed.add(place)
                continue
            assert held[place] == (0 if place in refreshed else lens[place])
            gathered += place in refreshed
            refreshed.discard(place)
        gather()

    host.compact._gather = watch
    host.decode(24, rng)
    assert gathered > 0
    assert host.kinds["partial"] > gathered


def test_a_commit_without_the_views_only_means_a_copy_later() -> None:
    rng = seeded()
    seed, story = rng.randrange(1 << 30), rng.randrange(1 << 30)
    shown = []
    for fed in (True, False):
        rng = random.Random(story)
        torch.manual_seed(seed)
        host = start(rng, configured(rng, specpv_storage="compact", specpv_selector="specpv"))
        if not fed:
            host.compact.tail = lambda root_slots: None
        shown.append(host.decode(20, rng))
    assert shown[0] == shown[1]


@pytest.mark.parametrize("failure", [RuntimeError, NworError])
def test_a_failed_copy_falls_back_to_the_whole_prefix(failure: type[Exception]) -> None:
    rng = seeded()
    config = configured(rng, specpv_storage="compact", specpv_selector="specpv")
    host = start(rng, config, count=2)
    gather = host.compact._gather

    def failing() -> None:
        raise failure("injected: the copy failed")

    counted = Metrics().snapshot()["specpv_full_steps_total"].get("offload_failure", 0)
    host.step([[], []])
    host.compact._gather = failing
    host.step([[], []])
    first, second = host.requests
    assert first.decision.kind == second.decision.kind == "partial"
    assert host.compact.view(0).lens.tolist() == [-1, -1]
    for request in (first, second):  # they saw everything: full attention chooses that token
        tokens = request.tokens
        assert tokens[-1] == int(plain_kv(host.w, tokens[:-1])[0][-1].argmax())
    host.compact._gather = gather
    host.step([[], []])
    assert first.decision.trigger == second.decision.trigger == "offload_failure"
    after = Metrics().snapshot()["specpv_full_steps_total"]["offload_failure"]
    assert after == counted + 2
    host.step([[], []])
    assert first.decision.kind == "partial"
    assert host.compact.view(0).lens.tolist()[0] > 0


def test_a_budget_that_covers_the_context_changes_nothing() -> None:
    rng = seeded()
    config = configured(rng, specpv_selector="specpv", specpv_n_retrieval_blocks=16)
    host = start(rng, config, count=1)
    (request,) = host.requests
    plain = decode_plainly(host.w, request.tokens, 20)
    assert host.decode(20, rng) == [plain]
