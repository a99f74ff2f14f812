"""Where our speculator and our scheduler stand in vLLM's places: names, calls, what they are told.

vLLM is not imported while tests are collected: pytest would log twice.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_specpv.vllm import speculators


def test_our_propose_is_called_as_vllms() -> None:
    from nwor_specpv.vllm.specpv.speculator import EagleSpeculator, PartialViewSpeculator

    ours = inspect.signature(PartialViewSpeculator.propose).parameters
    theirs = inspect.signature(EagleSpeculator.propose).parameters
    assert list(ours) == list(theirs)


def test_the_name_is_replaced_once_and_only_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    speculators.install()
    speculators.install()
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
    assert not speculators.wanted(config("eagle3", enable_specpv=True, specpv_rectify="refresh"))
    assert not speculators.wanted(config("mtp", enable_specpv=True))
    assert not speculators.wanted(config("eagle3"))
    assert not speculators.wanted(config(None, enable_specpv=True))

    monkeypatch.setattr(package, "init_speculator", lambda other: other)
    speculators.install()
    assert speculators.problem is not None
    assert "vllm_config, device" in speculators.problem
    monkeypatch.undo()
    speculators.install()
    assert speculators.problem is None


def test_the_scheduler_asks_for_as_many_drafts_as_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    from nwor_specpv.vllm.specpv import scheduler as ours

    told = []
    monkeypatch.setattr(
        ours.AsyncScheduler,
        "_update_after_schedule",
        lambda _, output: told.append(output.num_spec_tokens_to_schedule),
    )
    scheduler = ours.LongContextScheduler.__new__(ours.LongContextScheduler)
    scheduler.num_spec_tokens = 16
    compilation = SimpleNamespace(static_forward_context={})
    scheduler.vllm_config = SimpleNamespace(
        additional_config={"nwor_specpv": {"enable_specpv": True}}, compilation_config=compilation
    )

    def request(computed: int, tokens: int, placeholders: int = 0) -> Any:
        return SimpleNamespace(
            num_computed_tokens=computed, num_tokens=tokens, num_output_placeholders=placeholders
        )

    cases = [
        ({"a": (request(3000, 3001), 1)}, 4),
        ({"a": (request(200_000, 200_001), 1)}, 16),
        ({"a": (request(200_000, 200_018, 3), 21)}, 16),
        ({"a": (request(200_000, 300_000), 512)}, 4),  # a prompt that is not done yet
        ({"a": (request(200_000, 300_000), 512), "b": (request(160_000, 160_001), 17)}, 16),
        ({}, 4),
    ]
    for requests, expected in cases:
        scheduler.requests = {name: found for name, (found, _) in requests.items()}
        rows = {name: number for name, (_, number) in requests.items()}
        scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens=rows))
        assert told[-1] == expected, requests


def test_other_schedulers_are_known() -> None:
    from nwor_specpv.vllm.specpv.scheduler import LongContextScheduler
    from nwor_specpv.vllm.specpv.speculator import chooses_lengths

    assert chooses_lengths(LongContextScheduler)
    assert chooses_lengths("nwor_specpv.vllm.specpv.scheduler.LongContextScheduler")
    assert not chooses_lengths(None)
    assert not chooses_lengths("vllm.v1.core.sched.async_scheduler.AsyncScheduler")
