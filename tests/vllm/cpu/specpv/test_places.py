"""Where our speculator and our scheduler stand in vLLM's places: names, calls, what they are told.

vLLM is not imported while tests are collected: pytest would log twice.
"""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_specpv.vllm import plugin
from nwor_specpv.vllm.hooks import speculators
from support.installed import ADAPTER

pytestmark = pytest.mark.quick


def test_our_propose_is_called_as_vllms() -> None:
    from nwor_specpv.vllm.specpv.self_speculator import SelfSpeculator
    from nwor_specpv.vllm.specpv.speculator import EagleSpeculator, PartialViewSpeculator
    from nwor_specpv.vllm.versions.adapter import PROPOSED

    theirs = list(inspect.signature(EagleSpeculator.propose).parameters)
    assert theirs == list(ADAPTER.propose.parameters)
    for speculator in (PartialViewSpeculator, SelfSpeculator):
        *ours, others = inspect.signature(speculator.propose).parameters.values()
        assert [one.name for one in ours] == theirs[: len(ours)] == list(PROPOSED)
        assert others.kind is inspect.Parameter.VAR_KEYWORD  # vLLM names the rest


def test_the_name_is_replaced_once_and_only_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    speculators.install(plugin._make_speculator)
    speculators.install(plugin._make_speculator)
    assert speculators.problem is None
    import vllm.v1.worker.gpu.model_runner as runner
    import vllm.v1.worker.gpu.spec_decode as package

    assert runner.init_speculator is package.init_speculator
    assert not hasattr(package.init_speculator.__wrapped__, "__wrapped__")

    def config(method: str | None, **nwor: Any) -> Any:
        speculative = SimpleNamespace(method=method) if method else None
        return SimpleNamespace(
            speculative_config=speculative, additional_config={"nwor_specpv": nwor}
        )

    assert speculators.wanted(config("eagle3", enable_specpv=True))
    assert not speculators.wanted(config("eagle3", enable_specpv=True, specpv_mode="refresh"))
    assert not speculators.wanted(config("mtp", enable_specpv=True))
    assert not speculators.wanted(config("eagle3"))
    assert not speculators.wanted(config(None, enable_specpv=True))

    monkeypatch.setattr(package, "init_speculator", lambda other: other)
    speculators.install(plugin._make_speculator)
    assert speculators.problem is not None
    assert "vllm_config, device" in speculators.problem
    monkeypatch.undo()
    speculators.install(plugin._make_speculator)
    assert speculators.problem is None


class Output(SimpleNamespace):
    """What a step is told, of vLLM's schedule."""

    def __init__(self, rows: dict[str, int], wanted: int, requests: dict[str, Any]) -> None:
        computed = [requests[name].num_computed_tokens for name in rows]
        super().__init__(
            num_scheduled_tokens=rows,
            total_num_scheduled_tokens=sum(rows.values()),
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(num_computed_tokens=computed),
            num_spec_tokens_to_schedule=wanted,
            scheduled_spec_decode_tokens={},
            has_structured_output_requests=False,
            pending_structured_output_tokens=False,
        )


def validated(request: Any, drafts: list[int]) -> list[int]:
    """As vLLM's manager from 0.32 on: drafts that the request's grammar lets through."""
    if not request.use_structured_output:
        return drafts
    return request.structured_output_request.grammar.validate_tokens(drafts)


def scheduler_of(
    monkeypatch: pytest.MonkeyPatch, method: str | None = "eagle3", drafts: int = 16, **nwor: Any
) -> Any:
    """Ours over vLLM's own, which has no caches."""
    from nwor_specpv.vllm.specpv import scheduler as ours

    def begin(self: Any, vllm_config: Any) -> None:
        self.vllm_config, self.requests = vllm_config, {}
        self.num_spec_tokens, self.num_sampled_tokens_per_step = drafts, 1
        self.use_v2_model_runner, self.current_step = True, 0
        self.pp_size = self.decode_stagger = 1
        self.defer_block_free = self.enable_return_routed_experts = False
        self._inflight_prefills = set()
        self.structured_output_manager = SimpleNamespace(
            should_advance=lambda request: request.use_structured_output,
            validate_tokens=validated,
        )

    monkeypatch.setattr(ours.AsyncScheduler, "__init__", begin)
    return ours.LongContextScheduler(
        SimpleNamespace(
            speculative_config=SimpleNamespace(method=method) if method else None,
            additional_config={"nwor_specpv": {"enable_specpv": True} | nwor},
            compilation_config=SimpleNamespace(static_forward_context={}),
        )
    )


class Request(SimpleNamespace):
    __hash__ = object.__hash__  # vLLM's are kept in sets


def request(computed: int, tokens: int, placeholders: int = 0, allowed: int | None = None) -> Any:
    """`allowed`: drafts that its grammar lets through; None: it has none."""
    grammar = SimpleNamespace(validate_tokens=lambda drafts: drafts[:allowed])
    return Request(
        num_computed_tokens=computed,
        num_tokens=tokens,
        num_output_placeholders=placeholders,
        num_in_flight_tokens=0,
        spec_token_ids=[],
        use_structured_output=allowed is not None,
        structured_output_request=SimpleNamespace(grammar=grammar),
        is_finished=lambda: False,
    )


def test_the_scheduler_asks_for_as_many_drafts_as_it_has_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler = scheduler_of(monkeypatch, specpv_draft_passes=3)
    cases = [
        ({"a": (request(3000, 3001), 1)}, (4, 0)),
        ({"a": (request(200_000, 200_001), 1)}, (16, 3)),
        ({"a": (request(200_000, 200_018, 3), 21)}, (16, 3)),
        ({"a": (request(200_000, 300_000), 512)}, (0, 0)),  # a prompt that is not done yet
        ({"a": (request(200_000, 300_000), 512), "b": (request(160_000, 160_001), 17)}, (16, 3)),
        ({}, (0, 0)),
    ]
    for requests, expected in cases:
        scheduler.requests = {name: found for name, (found, _) in requests.items()}
        output = Output(
            {name: number for name, (_, number) in requests.items()}, 16, scheduler.requests
        )
        scheduler._update_after_schedule(output)
        decided = output.num_spec_tokens_to_schedule, output.nwor_specpv_passes
        assert decided == expected, requests


def test_speed_decides_and_failed_passes_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps through the scheduler: passes are made free, and so they are chosen until they fail."""
    from nwor_specpv.vllm.scheduling import scheduler as base
    from nwor_specpv.vllm.specpv import scheduler as ours

    scheduler, now = scheduler_of(monkeypatch), [0.0]
    monkeypatch.setattr(base.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(base.AsyncScheduler, "update_from_output", lambda *_: "vLLM's")
    engine = SimpleNamespace(lengths=SimpleNamespace(given_up=False))
    monkeypatch.setattr(ours, "find_engine", lambda _: engine)
    drafts, asked = 0, []

    def serve(steps: int) -> list[tuple[int, int]]:
        nonlocal drafts
        asked.clear()
        for _ in range(steps):
            scheduler.requests = {"a": request(9000, 9001), "b": request(9000, 9001)}
            output = Output(dict.fromkeys("ab", 1 + drafts), 16, scheduler.requests)
            output.scheduled_spec_decode_tokens = {name: [-1] * drafts for name in "ab" if drafts}
            scheduler._update_after_schedule(output)
            sampled = [[7] * (1 + drafts)] * 2
            now[0] += 0.01
            told = SimpleNamespace(sampled_token_ids=sampled)
            assert scheduler.update_from_output(output, told) == "vLLM's"
            drafts = output.num_spec_tokens_to_schedule
            asked.append((drafts, getattr(output, "nwor_specpv_passes", 0)))  # none: a plain step
        return asked

    assert serve(4) == [(0, 0)] * 4, "it starts with plain steps"
    assert serve(300)[-1][0] == 16
    assert asked[-1][1] > 0
    engine.lengths.given_up = True
    assert {passes for _, passes in serve(200)} == {0}
    assert asked[-1] == (4, 0)


@pytest.mark.parametrize(("tokens", "wanted"), [(3000, 4), (200_000, 16)])
def test_without_asynchronous_scheduling_only_drafts_that_were_made_are_verified(
    tokens: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's runner reports all columns there are; the head has filled those asked for."""
    from vllm.v1.outputs import DraftTokenIds

    scheduler = scheduler_of(monkeypatch, specpv_draft_passes=3)
    rows = {"plain": 1, "strict": 1, "loose": 1, "prompt": 512}
    scheduler.requests = {
        "plain": request(tokens, tokens + 1),
        "strict": request(tokens, tokens + 1, allowed=2),
        "loose": request(tokens, tokens + 1, allowed=9),
        "prompt": request(0, 9000),
    }
    scheduler._update_after_schedule(Output(rows, 16, scheduler.requests))
    drafted = list(range(16))
    reported = DraftTokenIds([*rows, "gone"], [drafted[:] for _ in range(5)])
    scheduler.update_draft_token_ids(reported)
    found = {name: known.spec_token_ids for name, known in scheduler.requests.items()}
    assert found == {
        "plain": drafted[:wanted],
        "strict": drafted[:2],
        "loose": drafted[: min(9, wanted)],
        "prompt": [],
    }


@pytest.mark.parametrize(
    ("method", "drafts", "nwor"),
    [
        (None, 0, {}),
        (None, 0, {"enable_specpv": False}),
        ("eagle3", 16, {"enable_specpv": False}),
        ("eagle3", 16, {"enable_nwor": False}),
        ("eagle3", 16, {"specpv_mode": "refresh"}),
        ("mtp", 16, {}),
    ],
)
def test_elsewhere_the_scheduler_is_vllms_and_says_so(
    method: str | None,
    drafts: int,
    nwor: dict,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm.v1.outputs import DraftTokenIds

    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        scheduler = scheduler_of(monkeypatch, method, drafts, **nwor)
        scheduler.requests = {"a": request(3000, 3001)}
        for wanted in (drafts, drafts // 2):  # vLLM's own choice by batch size, too
            output = Output({"a": 1}, wanted, scheduler.requests)
            scheduler._update_after_schedule(output)
            assert output.num_spec_tokens_to_schedule == wanted
            assert scheduler.requests["a"].spec_token_ids == [-1] * wanted
    assert caplog.text.count("--scheduler-cls LongContextScheduler has no effect") == 1
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[7] * drafts]))
    assert scheduler.requests["a"].spec_token_ids == [7] * drafts


def test_other_schedulers_are_known() -> None:
    from nwor_specpv.vllm.specpv.proposals import chooses_lengths
    from nwor_specpv.vllm.specpv.scheduler import LongContextScheduler

    assert chooses_lengths(LongContextScheduler)
    assert chooses_lengths("nwor_specpv.vllm.specpv.scheduler.LongContextScheduler")
    assert not chooses_lengths(None)
    assert not chooses_lengths("vllm.v1.core.sched.async_scheduler.AsyncScheduler")
