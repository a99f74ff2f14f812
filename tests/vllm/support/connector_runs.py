"""What a KV connector saves and loads beside staging, checked in this process on either runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nwor_specpv import Metrics, NworError
from nwor_specpv.vllm import faults
from support.engines import STAGED, STOCK, drive, greedy, own_engine, start
from support.engines import stats as own_stats
from support.host_connector import HostConnector
from support.host_copies import HostCopies
from support.installed import PAGE
from support.metric_counts import grown
from support.prefix_cache_blocks import scheduler_of
from support.refusals import refuse_commits
from support.saved_blocks import Block, places_of, poison, reference_blocks

ARRIVALS = [0, 0, 2, 5, 5, 9]
MOST_IN_A_STEP = 5  # a token and four drafts


@dataclass(frozen=True)
class Reference:
    """Prompts, how vLLM alone answers them, and K/V of all their whole blocks."""

    prompts: list[list[int]]
    answers: list[list[int]]
    blocks: dict[tuple[int, int], Block]

    @property
    def texts(self) -> list[list[int]]:
        return [a + b for a, b in zip(self.prompts, self.answers, strict=True)]

    @property
    def places_of_prompts(self) -> set[tuple[int, int]]:
        return _places([len(prompt) for prompt in self.prompts])

    def places_known(self, late: int) -> set[tuple[int, int]]:
        """Of all but so many of the latest tokens."""
        return _places([len(text) - late for text in self.texts])


def _places(lengths: Sequence[int]) -> set[tuple[int, int]]:
    return {(i, place) for i, length in enumerate(lengths) for place in range(length // PAGE)}


def reference(prompts: list[list[int]], tokens: int) -> Reference:
    story = drive(start(STOCK, speculation=None), prompts, greedy(tokens))
    answers = [story.tokens[str(i)] for i in range(len(prompts))]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return Reference(prompts, answers, reference_blocks(texts))


def forget_connector() -> None:
    """vLLM, which has one connector for each process, forgets the last one."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    HostConnector.forget()
    ensure_kv_transfer_shutdown()


def begin(connector: dict[str, Any], nwor: dict[str, Any] = STAGED, **options: Any) -> Any:
    options |= {"kv_transfer_config": connector, "enable_prefix_caching": True}
    llm = start(nwor, **options)
    poison()
    return llm


def check_run(llm: Any, known: Reference) -> None:
    """All is answered as by vLLM alone, and nothing is bypassed."""
    cached = answer_twice(llm, known)
    whole = [i for i, prompt in enumerate(known.prompts) if len(prompt) >= 3 * PAGE]
    most = [len(text) - len(known.answers[0]) // 3 for text in known.texts]
    assert all(0 < cached[str(i)] < most[i] for i in whole)
    assert whole
    stats = own_stats()
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"]
    assert min(stats["committed_tokens"], stats["rejected_tokens"]) > 0
    assert stats["fallbacks"] == {}


def answer_twice(llm: Any, known: Reference) -> dict[str, int]:
    """The prompts are answered as by vLLM alone. Then the device forgets all, and texts that go
    on within their answers are answered in the same way, from what was loaded: how many tokens."""
    numbers = range(len(known.prompts))
    arrivals = ARRIVALS[: len(numbers)]
    tokens = len(known.answers[0])
    story = drive(llm, known.prompts, greedy(tokens), arrivals=arrivals)
    assert [story.tokens[str(i)] for i in numbers] == known.answers
    forget_all(llm)
    cut = tokens // 3
    longer = [text[:-cut] for text in known.texts]
    story = drive(llm, longer, greedy(cut), arrivals=arrivals)
    assert [story.tokens[str(i)] for i in numbers] == [answer[-cut:] for answer in known.answers]
    return story.cached


def forget_all(llm: Any) -> None:
    """With asynchronous scheduling a step is under way when the last request has ended."""
    for _ in range(4):
        if scheduler_of(llm).reset_prefix_cache():
            return
        llm.llm_engine.step()
    raise AssertionError("blocks are in use")


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


def check_offloading(llm: Any, known: Reference, late: int | None) -> None:
    """Of vLLM's connector. `late`: answers are saved as well, but for so many of the latest tokens
    of a text."""
    check_run(llm, known)
    assert HostCopies.newest.loaded
    wanted = known.places_of_prompts if late is None else known.places_known(late)
    assert places_of(offloaded(), known.blocks) >= wanted


def check_host(llm: Any, known: Reference, late: int) -> None:
    """Of ours, which saves answers too."""
    check_run(llm, known)
    assert HostConnector.loaded
    assert places_of(list(HostConnector.host.values()), known.blocks) >= known.places_known(late)


def check_fault(llm: Any, known: Reference) -> None:
    """Of vLLM's connector. It forgets what it has saved, and saves what is computed again."""
    drive(llm, known.prompts[:1], greedy(2))
    before, commits = Metrics().snapshot(), refuse_commits(own_engine(), {2, 3, 6})
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(faults, "PAUSE_SECONDS", 0.0)
        cached = answer_twice(llm, known)
    assert any(cached.values())
    assert commits.num_failed == 3
    assert 1 <= grown(before, "nwor_recoveries_total") <= commits.num_failed
    assert HostCopies.newest.loaded
    assert own_stats()["fallbacks"] == {"commit_lost": commits.num_failed}


def check_fault_with_kept_copies(llm: Any, known: Reference) -> None:
    """Of ours, which cannot forget: nothing may be computed from its copies."""
    drive(llm, known.prompts[:1], greedy(2))
    refuse_commits(own_engine(), {3})
    with pytest.raises(NworError, match="the KV connector keeps copies that cannot be told to go"):
        drive(llm, known.prompts, greedy(len(known.answers[0])))
