"""KV connectors beside staging, in the real vLLM on the CPU: what they save and what they load.

vLLM's offloading connector runs as it is, but for its copies (`host_copies.py`). One of our own
saves as early as a connector may (`host_connector.py`). On model runner V1; `test_connectors_v2.py`
has the same checks on V2.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from nwor_specpv.vllm import support
from nwor_specpv.vllm.staging import Staging
from support.connector_runs import (
    MOST_IN_A_STEP,
    Reference,
    begin,
    check_fault,
    check_fault_with_kept_copies,
    check_host,
    check_offloading,
    check_run,
    forget_connector,
    reference,
)
from support.engines import STOCK, counted, drive, greedy, own_engine
from support.engines import stats as own_stats
from support.host_connector import NAME, HostConnector, host_connector
from support.host_copies import HostCopies, offloading
from support.installed import ADAPTER, PAGE
from support.saved_blocks import POISON
from support.small_views import prompts

pytestmark = pytest.mark.serves("KV connectors", "V1")

TOKENS = 3 * PAGE + 5


@pytest.fixture(autouse=True)
def _one_connector_at_a_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(support, "CONNECTORS", support.CONNECTORS | {NAME})
    forget_connector()
    yield
    forget_connector()


@pytest.fixture(scope="module")
def known() -> Reference:
    return reference(prompts(), TOKENS)


@pytest.mark.parametrize("whole", [False, True], ids=["prompts", "answers"])
def test_offloading(whole: bool, known: Reference) -> None:
    connector = offloading(offload_prompt_only=not whole)
    if whole and ADAPTER.offloads_last_token:
        with pytest.raises(Exception, match="whose K/V nobody has computed; drop offload_prompt"):
            begin(connector)
        return
    llm = begin(connector)
    check_offloading(llm, known, MOST_IN_A_STEP + 1 if whole else None)
    assert counted(llm, "vllm:external_prefix_cache_hits") > 0


SLOW_MOMENTS = [pytest.param(when, marks=pytest.mark.slow) for when in ("forward", "next")]


@pytest.mark.parametrize("when", ["layer", *SLOW_MOMENTS])
def test_known_tokens_are_saved_at_any_time_of_a_step(
    when: str, known: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the contract checker, as this connector loads between steps."""
    monkeypatch.setattr(Staging, "_foreign_writes", lambda _: None)
    check_host(begin(host_connector(when)), known, MOST_IN_A_STEP + 1)
    assert own_engine().checker is not None
    assert own_engine().violations == []


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
def test_preempted_requests_come_back(known: Reference) -> None:
    llm = begin(host_connector("layer"), num_gpu_blocks_override=544 // PAGE, max_model_len=480)
    check_run(llm, known)
    assert counted(llm, "vllm:num_preemptions") > 0


def test_after_a_fault_copies_are_forgotten(known: Reference) -> None:
    """Answers are saved as well, where the plugin allows it."""
    check_fault(begin(offloading(offload_prompt_only=ADAPTER.offloads_last_token), nwor={}), known)


def test_after_a_fault_a_connector_that_cannot_forget_ends_the_engine(known: Reference) -> None:
    check_fault_with_kept_copies(begin(host_connector("layer"), nwor={}), known)


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
