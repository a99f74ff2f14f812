"""What requests of mode `refresh` publish, over a scheduler that is only told to."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from nwor_specpv.errors import NworError
from nwor_specpv.vllm.specpv.publishing import CapsPublished

REFRESH = {"enable_specpv": True, "specpv_mode": "refresh", "specpv_partial_threshold": 5000}


class Coordinator:
    def __init__(self) -> None:
        self.published: list[tuple[str, int]] = []

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        self.published.append((request.name, num_computed_tokens))


class Other(Coordinator):
    def cache_blocks(self, request: Any, first: int, last: int) -> None:
        """As a vLLM to come may have it."""


class Plain:
    """What the cap needs of a vLLM scheduler."""

    num_spec_tokens = 4

    def __init__(self, settings: dict, coordinator: Any, *, caching: bool = True) -> None:
        self.vllm_config = SimpleNamespace(
            additional_config={"nwor_specpv": settings}, max_concurrent_batches=2
        )
        self.kv_cache_manager = SimpleNamespace(coordinator=coordinator, enable_caching=caching)


class Capped(CapsPublished, Plain):
    pass


class Request:
    def __init__(self, name: str, prompt: int) -> None:
        self.name, self.num_prompt_tokens = name, prompt


def test_prompts_and_short_contexts_are_published_and_nothing_more() -> None:
    coordinator = Coordinator()
    scheduler = Capped(REFRESH, coordinator)
    assert scheduler.full_tokens == 5000 - 4
    for name, prompt in (("long", 9000), ("short", 100)):
        request = Request(name, prompt)
        for tokens in (64, 4996, 4997, 9000, 9001, 20_000):
            coordinator.cache_blocks(request, tokens)
    assert coordinator.published == [
        *(("long", tokens) for tokens in (64, 4996, 4997, 9000, 9000, 9000)),
        *(("short", tokens) for tokens in (64, 4996, 4996, 4996, 4996, 4996)),
    ]


def test_answers_that_a_session_calls_prompt_are_answers() -> None:
    """The next input of a session follows what was answered, and vLLM counts all as prompt; the
    cache keeps what partial steps have made of the answer."""
    coordinator = Coordinator()
    scheduler = Capped(REFRESH, coordinator)
    session = Request("session", 6000)
    coordinator.cache_blocks(session, 6000)
    session.num_prompt_tokens = 8000
    coordinator.cache_blocks(session, 8000)
    assert coordinator.published == [("session", 6000)] * 2
    assert len(scheduler._prompts) == 1
    del session
    assert len(scheduler._prompts) == 0


@pytest.mark.parametrize(
    ("settings", "caching"), [({}, True), (REFRESH, False), ({"enable_specpv": True}, True)]
)
def test_elsewhere_it_caps_nothing_and_says_so(
    settings: dict, caching: bool, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = Coordinator()
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        Capped(settings, coordinator, caching=caching)
    assert "--scheduler-cls Capped has no effect" in caplog.text
    coordinator.cache_blocks(Request("a", 10), 20_000)
    assert coordinator.published == [("a", 20_000)]


def test_a_vllm_that_publishes_otherwise_is_refused() -> None:
    with pytest.raises(NworError, match=r"cache_blocks takes \(self, request, first, last\)"):
        Capped(REFRESH, Other())
