"""VerifyPolicy and PartialCache against a model written from the specification, step by step."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import weakref
from dataclasses import dataclass, field

import pytest

from nwor_specpv import FULL_TRIGGERS, Metrics, NworError, PartialCache, SpecPVConfig, VerifyPolicy
from tests.python.specpv.contexts import seeded

STEPS = int(os.environ.get("NWOR_POLICY_STEPS", "100000"))


@dataclass
class Model:
    """One request, kept as lists of tokens: what was verified, what is provisional."""

    enabled: bool
    mode: str
    block: int
    sink: int
    retrieval: int
    window: int
    capacity: int
    threshold: int
    interval: int
    verified: list[int] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    partial_in_a_row: int = 0
    chosen_at: int | None = None
    demanded: str | None = None
    shown: int = 0

    def expected(self, rows: int, host_asks: bool) -> tuple[str, str]:
        context = len(self.verified) + len(self.tail)
        view = (self.sink + self.retrieval + self.window) * self.block
        if not self.enabled:
            return ("full_refresh" if self.tail else "full"), "disabled"
        if context <= max(view, self.threshold):
            return ("full_refresh" if self.tail else "full"), "short_context"
        if self.demanded:
            return "full_refresh", self.demanded
        if self.chosen_at is None:
            return "full_refresh", "first"
        if len(self.tail) + rows > self.capacity:
            return "full_refresh", "tail_full"
        if self.interval and self.partial_in_a_row >= self.interval:
            return "full_refresh", "interval"
        if host_asks:
            return "full_refresh", "policy"
        return "partial", "none"

    def play(self, kind: str, accepted: int) -> int:
        """Tokens that may be shown."""
        context = len(self.verified) + len(self.tail)
        before = len(self.verified)
        self.demanded = None if kind != "partial" else self.demanded
        if kind == "partial":
            self.tail += [0] * (1 + accepted)
            self.partial_in_a_row += 1
            if len(self.tail) > self.capacity:
                self.demanded = "tail_overflow"
            return 0 if self.mode == "lossless" else 1 + accepted
        if kind == "full_refresh" and self.mode == "lossless":
            self.verified += [0] * (1 + accepted)
        else:
            self.verified += self.tail + [0] * (1 + accepted)
        self.tail = []
        self.partial_in_a_row = 0
        if kind == "full_refresh":
            self.chosen_at = before if self.mode == "lossless" else context
        return 1 + accepted

    def seen(self) -> int:
        """Tokens of a partial step: counted one by one."""
        context = len(self.verified) + len(self.tail)
        blocks = range(-(-context // self.block))
        first = max(self.sink, (self.chosen_at or 0) // self.block - self.window)
        always = [b for b in blocks if b < self.sink or b >= first]
        candidates = [b for b in blocks if self.sink <= b < first]
        chosen = always + candidates[: self.retrieval]
        return sum(min(self.block, context - b * self.block) for b in chosen)


def make(rng: random.Random) -> tuple[Model, SpecPVConfig, int, int]:
    max_rows = rng.randrange(1, 9)
    slack = rng.randrange(0, 12)
    model = Model(
        enabled=rng.random() < 0.95,
        mode=rng.choice(["rectify", "refresh", "lossless"]),
        block=rng.choice([1, 2, 4]),
        sink=rng.randrange(0, 3),
        retrieval=rng.randrange(0, 4),
        window=rng.randrange(1, 4),
        capacity=slack + max_rows,
        threshold=rng.choice([0, 0, rng.randrange(60)]),
        interval=rng.choice([0, 0, rng.randrange(1, 5)]),
    )
    config = SpecPVConfig(
        enable_specpv=model.enabled,
        specpv_block_size=model.block,
        specpv_n_sink_blocks=model.sink,
        specpv_n_retrieval_blocks=model.retrieval,
        specpv_n_window_blocks=model.window,
        specpv_n_spec_tokens_buf=slack,
        specpv_partial_threshold=model.threshold,
        specpv_full_refresh_interval=model.interval,
        specpv_mode=model.mode,
    )
    prompt = rng.randrange(0, 80)
    model.verified = [0] * prompt
    return model, config, max_rows, prompt


def run_story(rng: random.Random, steps: int, seen: dict[str, int]) -> None:
    model, config, max_rows, prompt = make(rng)
    asks = [False]
    calls = []

    def callback(cache: PartialCache) -> bool:
        calls.append(cache.committed_len)
        return asks[0]

    policy = VerifyPolicy(config, callback)
    cache = PartialCache(config, max_rows)
    cache.prefill(prompt)
    shown, drift = 0, (0, 0)
    for _ in range(steps):
        rows = rng.randrange(1, max_rows + 1)
        asks[0] = rng.random() < 0.1
        if rng.random() < 0.05:
            demanded = rng.choice(["policy", "refresh_failure", "offload_failure"])
            cache.require_full(demanded)
            model.demanded = demanded
        decision = policy.decide(cache, rows)
        kind, trigger = model.expected(rows, asks[0])
        assert (decision.kind, decision.trigger) == (kind, trigger)
        again = policy.decide(cache, rows)  # deciding changes nothing
        assert (again.kind, again.trigger) == (kind, trigger)
        n, f = len(model.verified) + len(model.tail), len(model.verified)
        assert (decision.committed_len, decision.full_len) == (n, f)
        refeeds = kind == "full_refresh" and model.mode != "refresh"
        assert decision.refed_rows == (len(model.tail) if refeeds else 0)
        assert decision.prefix_len == n - decision.refed_rows
        if kind == "partial":
            assert decision.view_tokens == model.seen() <= n
            assert len(model.tail) + rows <= model.capacity
        seen[trigger] = seen.get(trigger, 0) + 1
        over_tail = kind == "full_refresh" and model.mode == "lossless"
        accepted = rng.randrange(rows + (len(model.tail) if over_tail else 0))
        refed = decision.refed_rows
        disagreed = rng.randrange(-1, refed + 1)
        outcome = cache.finish(decision, accepted, disagreed)
        if over_tail and refed:
            stands = min(accepted, refed)
            drift = drift[0] + min(stands + 1, refed), drift[1] + (stands < refed)
        elif refed and disagreed >= 0:
            drift = drift[0] + refed, drift[1] + disagreed
        assert (cache.rechecked_tokens, cache.disagreed_tokens) == drift
        emitted = model.play(kind, accepted)
        shown += emitted
        assert outcome.emitted == emitted
        assert outcome.committed == len(model.verified) + len(model.tail) - n
        assert outcome.cut == max(0, n - f - 1 - accepted if over_tail else 0)
        assert cache.full_len == len(model.verified)
        assert cache.tail_len == len(model.tail)
        assert cache.committed_len == cache.full_len + cache.tail_len
        assert cache.emitted_len == (
            cache.full_len if model.mode == "lossless" else cache.committed_len
        )
        sink = min(model.sink * model.block, cache.full_len)
        window = max(model.sink, (model.chosen_at or 0) // model.block - model.window)
        window = min(window * model.block, cache.full_len)
        assert cache.segments == {
            "sink": (0, sink),
            "candidates": (sink, window),
            "window": (window, cache.full_len),
            "tail": (cache.full_len, cache.committed_len),
        }
    assert shown == cache.emitted_len - prompt


def test_random_steps_against_the_model() -> None:
    rng = seeded()
    seen: dict[str, int] = {}
    done = 0
    while done < STEPS:
        steps = rng.randrange(5, 200)
        run_story(rng, steps, seen)
        done += steps
    assert set(seen) == set(FULL_TRIGGERS) - {"tail_overflow"}, seen


CONFIG = SpecPVConfig(
    enable_specpv=True,
    specpv_block_size=4,
    specpv_n_sink_blocks=1,
    specpv_n_retrieval_blocks=2,
    specpv_n_window_blocks=1,
    specpv_n_spec_tokens_buf=3,
)


def partial_cache() -> tuple[PartialCache, VerifyPolicy]:
    cache, policy = PartialCache(CONFIG, max_rows=4), VerifyPolicy(CONFIG)
    cache.prefill(40)
    cache.finish(policy.decide(cache, 4), 1)
    return cache, policy


def test_a_tree_beyond_its_promise_is_refused() -> None:
    cache, policy = partial_cache()
    with pytest.raises(NworError, match=r"num_rows: got 7, expected 1 to 4"):
        policy.decide(cache, 7)
    wider = PartialCache(CONFIG, max_rows=8)
    wider.prefill(42)
    with pytest.raises(NworError, match=r"decision: got one of 7 rows, expected at most 4"):
        cache.finish(policy.decide(wider, 7), 6)
    assert (cache.committed_len, cache.tail_len) == (42, 0)
    decision = policy.decide(cache, 4)
    assert decision.kind == "partial"
    cache.finish(decision, 3)
    assert policy.decide(cache, 4).trigger == "tail_full"
    cache.require_full("tail_overflow")
    assert policy.decide(cache, 1).trigger == "tail_overflow"


def test_wrong_use_is_named() -> None:
    cache, policy = partial_cache()
    decision = policy.decide(cache, 3)
    for accepted in (-1, 3):
        with pytest.raises(NworError, match=f"accepted: got {accepted}, expected 0 to 2"):
            cache.finish(decision, accepted)
    with pytest.raises(NworError, match="disagreed: got 1, expected 0 to 0"):
        cache.finish(decision, 2, 1)
    cache.finish(decision, 2)
    with pytest.raises(NworError, match=r"decision: got one of F = 42, N = 42, expected F = 42"):
        cache.finish(decision, 2)
    with pytest.raises(NworError, match="tail of 3 tokens, expected none"):
        cache.prefill(1)
    with pytest.raises(NworError, match="num_rows: got 0"):
        policy.decide(cache, 0)
    with pytest.raises(NworError, match="trigger: got 'never', expected one of"):
        cache.require_full("never")
    with pytest.raises(NworError, match="max_rows: got 0"):
        PartialCache(CONFIG, 0)
    with pytest.raises(NworError, match="disagreed: got 3 of 2"):
        cache.count_drift(2, 3)


def test_tokens_put_in_outside_of_steps_want_a_new_choice() -> None:
    """The view was chosen over a shorter context: its window would begin too early."""
    cache, policy = partial_cache()
    assert policy.decide(cache, 1).kind == "partial"
    cache.prefill(0)
    assert policy.decide(cache, 1).kind == "partial"
    cache.prefill(100)
    decision = policy.decide(cache, 1)
    assert (decision.kind, decision.trigger) == ("full_refresh", "first")
    cache.finish(decision, 0)
    assert policy.decide(cache, 1).kind == "partial"
    assert cache.anchor_len == 142


def test_a_context_within_the_sink_has_no_window() -> None:
    cache = PartialCache(SpecPVConfig(enable_specpv=True), max_rows=4)
    cache.prefill(10)
    spans = {"sink": (0, 10), "candidates": (10, 10), "window": (10, 10), "tail": (10, 10)}
    assert cache.segments == spans


def test_lengths_that_no_device_counts_are_refused() -> None:
    most = 2**31 - 1024
    for rows in (most + 1, 2**63 - 1):
        with pytest.raises(NworError, match=f"max_rows: got {rows}, expected 1 to {most}"):
            PartialCache(CONFIG, rows)
    cache, policy = PartialCache(CONFIG, max_rows=4), VerifyPolicy(CONFIG)
    cache.prefill(100)
    for tokens in (most - 99, 2**32 + 100, 2**63 - 1):
        with pytest.raises(
            NworError, match=f"num_tokens: got {tokens}, expected 0 to {most - 100}"
        ):
            cache.prefill(tokens)
    assert cache.full_len == 100
    cache.prefill(most - 102)
    cache.finish(policy.decide(cache, 2), 0)
    assert cache.segments["window"] == (most - 8, most - 1)
    with pytest.raises(NworError, match=f"num_rows: got 2, expected at most 1.* {most}"):
        policy.decide(cache, 2)


def test_a_callback_that_raises_is_heard() -> None:
    def broken(cache: PartialCache) -> bool:
        raise KeyError(cache.committed_len)

    cache, _ = partial_cache()
    with pytest.raises(KeyError, match="42"):
        VerifyPolicy(CONFIG, broken).decide(cache, 1)


class Owner:
    """Its policy asks it, and it holds the policy."""

    def __init__(self) -> None:
        self.policy = VerifyPolicy(CONFIG, self.asks)

    def asks(self, cache: PartialCache) -> bool:
        return cache.committed_len == 42


def test_a_policy_goes_with_the_owner_of_its_callback() -> None:
    owner = Owner()
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


def test_a_policy_that_is_held_keeps_its_callback() -> None:
    owner = Owner()
    policy, there = owner.policy, weakref.ref(owner)
    del owner
    gc.collect()
    assert there() is not None
    cache, _ = partial_cache()
    assert policy.decide(cache, 1).trigger == "policy"
    del policy
    gc.collect()
    assert there() is None


def test_a_policy_that_was_cleared_says_so() -> None:
    class Clearing(Owner):
        def asks(self, cache: PartialCache) -> bool:
            slot = slot_of(VerifyPolicy, 51)  # Py_tp_clear: what the collector does to a cycle
            assert slot
            assert ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(slot)(self.policy) == 0
            return super().asks(cache)

    slot_of = ctypes.pythonapi.PyType_GetSlot
    slot_of.restype, slot_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_int]
    cache, _ = partial_cache()
    owner = Clearing()
    assert owner.policy.decide(cache, 1).trigger == "policy"
    with pytest.raises(
        NworError, match=r"^callback: got a call after the garbage collector cleared"
    ):
        owner.policy.decide(cache, 1)


def test_steps_are_counted() -> None:
    before = Metrics().snapshot()
    cache, policy = partial_cache()
    decision = policy.decide(cache, 3)
    cache.finish(decision, 1)
    cache.count_drift(5, 2)
    after = Metrics().snapshot()

    def grown(name: str) -> int:
        return after[name] - before[name]

    assert grown("specpv_partial_steps_total") == 1
    assert grown("specpv_view_tokens_sum") == decision.view_tokens
    assert grown("specpv_view_tokens_count") == grown("specpv_context_tokens_count") == 1
    assert grown("specpv_context_tokens_sum") == 42
    assert grown("specpv_rechecked_tokens_total") == 5
    assert grown("specpv_disagreed_tokens_total") == 2
    first = after["specpv_full_steps_total"]["first"]
    assert first - before["specpv_full_steps_total"].get("first", 0) == 1
    assert 'specpv_full_steps_total{trigger="interval"}' in Metrics().render()
