"""KV connectors beside staging, in the real vLLM on the CPU: what they save and what they load.

vLLM's offloading connector runs as it is, but for its copies (`host_copies.py`). One of our own
saves as early as a connector may (`host_connector.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nwor_specpv import NworError
from nwor_specpv.vllm import support
from nwor_specpv.vllm.staging import Staging
from support.engines import STAGED, STOCK, counted, drive, greedy, own_engine, start
from support.engines import stats as own_stats
from support.host_connector import NAME, HostConnector, host_connector
from support.host_copies import HostCopies, offloading
from support.installed import ADAPTER, PAGE
from support.prefix_cache_blocks import scheduler_of
from support.refusals import refuse_commits
from support.saved_blocks import POISON, Block, places_of, poison, reference_blocks
from support.small_views import prompts

pytestmark = pytest.mark.serves("KV connectors", "V1")

TOKENS = 3 * PAGE + 5
MOST_IN_A_STEP = 5  # a token and four drafts
ARRIVALS = [0, 0, 2, 5, 5, 9]


@pytest.fixture(autouse=True)
def _one_connector_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ours is let in, and vLLM, which has one for each process, forgets that of a test."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    monkeypatch.setattr(support, "CONNECTORS", support.CONNECTORS | {NAME})
    HostConnector.forget()
    yield
    ensure_kv_transfer_shutdown()


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """What vLLM alone says."""
    story = drive(start(STOCK, speculation=None), prompts(), greedy(TOKENS))
    return [story.tokens[str(i)] for i in range(6)]


@pytest.fixture(scope="module")
def texts(answers: list[list[int]]) -> list[list[int]]:
    return [prompt + answer for prompt, answer in zip(prompts(), answers, strict=True)]


@pytest.fixture(scope="module")
def blocks(texts: list[list[int]]) -> dict[tuple[int, int], Block]:
    return reference_blocks(texts)


def begin(connector: dict[str, Any], nwor: dict[str, Any] = STAGED, **options: Any) -> Any:
    options |= {"kv_transfer_config": connector, "enable_prefix_caching": True}
    llm = start(nwor, **options)
    poison()
    return llm


def check_run(llm: Any, texts: list[list[int]], answers: list[list[int]]) -> None:
    """The prompts are answered as by vLLM alone. Then the device forgets all, and texts that go
    on within their answers are answered in the same way, from what was loaded."""
    story = drive(llm, prompts(), greedy(TOKENS), arrivals=ARRIVALS)
    assert [story.tokens[str(i)] for i in range(6)] == answers
    assert scheduler_of(llm).reset_prefix_cache()
    cut = TOKENS - 2 * PAGE
    longer = [text[:-cut] for text in texts]
    story = drive(llm, longer, greedy(cut), arrivals=ARRIVALS)
    assert [story.tokens[str(i)] for i in range(6)] == [answer[-cut:] for answer in answers]
    assert all(0 < story.cached[str(i)] < len(longer[i]) for i in (0, 2, 3, 5))
    stats = own_stats()
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"]
    assert min(stats["committed_tokens"], stats["rejected_tokens"]) > 0
    assert stats["fallbacks"] == {}


def places_known(texts: list[list[int]]) -> set[tuple[int, int]]:
    """Blocks that are known and computed before a request's last step, at the latest."""
    return {
        (number, place)
        for number, text in enumerate(texts)
        for place in range((len(text) - MOST_IN_A_STEP - 1) // PAGE)
    }


def offloaded() -> list[Block]:
    """What vLLM's connector has saved; layers by their place in memory."""
    copies, found = HostCopies.newest, {}
    for name in own_engine().own_layers:
        cache = own_engine().layers[name].kv_cache
        (at,) = (i for i, one in enumerate(copies.caches) if one.data_ptr() == cache.data_ptr())
        found[name] = copies.host[at].view(torch.float32).view(-1, *cache.shape[1:])
    return [
        {name: chunks[number] for name, chunks in found.items()}
        for number in sorted(set(copies.stored))
    ]


@pytest.mark.parametrize("whole", [False, True], ids=["prompts", "answers"])
def test_offloading(
    whole: bool,
    texts: list[list[int]],
    answers: list[list[int]],
    blocks: dict[tuple[int, int], Block],
) -> None:
    connector = offloading(offload_prompt_only=not whole)
    if whole and ADAPTER.offloads_last_token:
        with pytest.raises(Exception, match="whose K/V nobody has computed; drop offload_prompt"):
            begin(connector)
        return
    llm = begin(connector)
    check_run(llm, texts, answers)
    assert HostCopies.newest.loaded
    assert counted(llm, "vllm:external_prefix_cache_hits") > 0
    places = places_of(offloaded(), blocks)
    of_prompts = {
        (number, place)
        for number, prompt in enumerate(prompts())
        for place in range(len(prompt) // PAGE)
    }
    assert places >= (places_known(texts) if whole else of_prompts)


SLOW_MOMENTS = [pytest.param(when, marks=pytest.mark.slow) for when in ("forward", "next")]


@pytest.mark.parametrize("when", ["layer", *SLOW_MOMENTS])
def test_known_tokens_are_saved_at_any_time_of_a_step(
    when: str,
    texts: list[list[int]],
    answers: list[list[int]],
    blocks: dict[tuple[int, int], Block],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under the contract checker, as this connector loads between steps."""
    monkeypatch.setattr(Staging, "_foreign_writes", lambda _: None)
    check_run(begin(host_connector(when)), texts, answers)
    assert own_engine().checker is not None
    assert own_engine().violations == []
    assert HostConnector.loaded
    saved = list(HostConnector.host.values())
    assert places_of(saved, blocks) >= places_known(texts)


def test_rows_of_a_step_are_what_a_connector_must_not_save() -> None:
    """Drafts are not there yet. So connectors that nobody has tried are refused. No block has been
    used twice."""
    story = drive(begin(host_connector("rows")), prompts(), greedy(TOKENS), max_steps=20)
    assert not story.finished
    unwritten = sum(int((rows == POISON).all(dim=(1, 2)).sum()) for rows in HostConnector.rows)
    layers = len(own_engine().own_layers)
    assert unwritten == layers * own_stats()["staged_tokens"] > 0


def test_the_contract_checker_stands_aside(caplog: pytest.LogCaptureFixture) -> None:
    """It would take what is loaded for damage."""
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        drive(begin(host_connector("next")), prompts()[:2], greedy(8))
    assert "check_contract is ignored: a KV connector loads blocks at any time" in caplog.text
    assert own_engine().checker is None


@pytest.mark.slow
def test_preempted_requests_come_back(texts: list[list[int]], answers: list[list[int]]) -> None:
    llm = begin(host_connector("layer"), num_gpu_blocks_override=544 // PAGE, max_model_len=480)
    check_run(llm, texts, answers)
    assert counted(llm, "vllm:num_preemptions") > 0


def test_a_fault_ends_the_engine() -> None:
    """A block without rows that were lost may be saved already, so nothing is computed again."""
    llm = begin(offloading(), nwor={})
    drive(llm, prompts()[:1], greedy(2))
    refuse_commits(own_engine(), {3})
    with pytest.raises(NworError, match="a KV connector keeps copies: restart the server"):
        drive(llm, prompts(), greedy(TOKENS))


def test_what_vllm_offloads_of_a_text_that_ends_with_a_block() -> None:
    """vLLM alone, without speculation: the last token was never computed."""
    prompt = prompts()[0]
    begin_with = offloading(offload_prompt_only=False)
    llm = begin(begin_with, nwor=STOCK, speculation=None)
    drive(llm, [prompt], greedy(3 * PAGE - len(prompt) % PAGE))
    drive(llm, prompts()[4:5], greedy(4))  # what is under way is done
    copies = HostCopies.newest
    assert copies.stored
    kept = copies.host[0].view(torch.float32)[sorted(set(copies.stored))]
    assert bool((kept == POISON).any()) is ADAPTER.offloads_last_token
