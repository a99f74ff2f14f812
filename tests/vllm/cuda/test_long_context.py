"""Partial views in the real vLLM on a GPU: mode `refresh` with a real model over a book, and what
happens to requests of the story model in mode `lossless`, their caches and tokens that are drawn.

What plain vLLM gives is computed once; `compare_runs.py` says what may differ. The story model
runs in float16, which rounds eight times finer than bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cuda import (
    GRAPHS,
    TURN,
    alike,
    begin,
    check_log_probabilities,
    smollm2_head,
    stories_on_gpu,
)
from test_cuda_specpv import REFRESH, SCHEDULER, SPECULATION, grown

from nwor_specpv import Metrics
from nwor_specpv.models import smollm2
from support import chi_square
from support.cache_write_watch import ProposalWriteWatch
from support.compare_runs import RunComparison, compare_runs
from support.disturbances import ASKED, BOOK, MAX_TOKENS, Disturbed, Script, wanted
from support.disturbances import stories as story_script
from support.engines import NGRAM, check_drafting, drive, greedy, own_engine, release_engines
from support.engines import stats as own_stats
from support.heads import story_head
from support.small_views import SMALL_VIEW, cover_all, prompts, varied_prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

STOCK = {"speculation": None, "attention_backend": "FLASH_ATTN"}
PLAIN = {"enable_nwor": False}


# ---- mode `refresh`, SmolLM2 over a book ----

# Covers the shorter texts, and less than half of the longer ones.
BOOK_VIEW = REFRESH | {
    "specpv_n_sink_blocks": 2,
    "specpv_n_retrieval_blocks": 150,
    "specpv_n_window_blocks": 6,
    "specpv_full_refresh_interval": 4,
}
BOOK_OPTIONS = {
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_prefix_caching": False,
}
LENGTHS = (64, 64, 64)
LONGER_LENGTHS = (96, 96, 32)


def texts(first: int, second: int) -> list[str]:
    """A book that goes on, a question about its beginning, a short question."""
    book = BOOK.read_text()
    told = (
        f"{book[:first]}\n\nContinue.",
        ASKED.format(book[9000 : 9000 + second]),
        "Name ten animals.",
    )
    return [TURN.format(text) for text in told]


def read(llm: Any, asked: list[str], lengths: tuple[int, ...]) -> list[Any]:
    params = [greedy(count, logprobs=1) for count in lengths]
    outputs = [output.outputs[0] for output in llm.generate(asked, params, use_tqdm=False)]
    assert [len(output.token_ids) for output in outputs] == list(lengths)
    return outputs


@dataclass
class Books:
    """What plain vLLM says."""

    covered: list[Any]
    longer: list[Any]


COVERED, LONGER = (9000, 6000), (27000, 24000)  # characters


@pytest.fixture(scope="module")
def books() -> Books:
    llm = begin(PLAIN, model=str(smollm2("bfloat16")), **(BOOK_OPTIONS | STOCK | GRAPHS))
    found = Books(read(llm, texts(*COVERED), LENGTHS), read(llm, texts(*LONGER), LONGER_LENGTHS))
    del llm
    release_engines()
    return found


def watch_replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests saw views in each step that was replayed from a graph."""
    from nwor_specpv.vllm.specpv.refresh_requests import RefreshRequests
    from nwor_specpv.vllm.steps import Steps

    decide, note = RefreshRequests.decide, Steps._note_replay
    latest, replayed = [0], []

    def counting(self: Any, *batch: Any) -> list[Any]:
        decisions = decide(self, *batch)
        latest[0] = sum(decision.partial for decision in decisions)
        return decisions

    def noting(self: Any, step: Any) -> None:
        before = self.num_replays
        note(self, step)
        if self.num_replays > before:
            replayed.append(latest[0])

    monkeypatch.setattr(RefreshRequests, "decide", counting)
    monkeypatch.setattr(Steps, "_note_replay", noting)
    return replayed


def counts(before: dict[str, Any]) -> tuple[int, int, int]:
    """Partial steps of requests, rows in which drift was looked for, and those that differ."""
    names = ("partial_steps", "probed_rows", "deviating_rows")
    partial, probed, deviating = (grown(before, f"specpv_{name}_total") for name in names)
    return partial, probed, deviating


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_refresh_reads_a_book(
    books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Full graphs, mixed lengths; V1 drafts by n-grams, V2 with the shipped head.

    Partial steps over views that hold everything give plain vLLM's log-probabilities; then texts
    that outgrow the view.
    """
    from nwor_specpv.vllm.specpv import drift

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "v2" else "0")
    replayed = watch_replays(monkeypatch)
    speculation = smollm2_head(tmp_path) if runner == "v2" else NGRAM
    model = {"model": str(smollm2("bfloat16")), "speculation": speculation}
    llm = begin(BOOK_VIEW, **(model | BOOK_OPTIONS | GRAPHS))
    monkeypatch.setattr(drift, "_READ_INTERVAL", 1)

    with monkeypatch.context() as patch:
        cover_all(patch, tokens=256)
        before = Metrics().snapshot()
        ours = read(llm, texts(*COVERED), LENGTHS)
    assert hasattr(own_engine().runner, "input_batch") is (runner == "v1")
    partial, probed, deviating = counts(before)
    print(
        f"{runner}, all in view: {partial} partial steps, {sum(replayed)} of them replayed, "
        f"{deviating} of {probed} rows deviate"
    )
    check_log_probabilities(books.covered, ours, f"{runner}, all in view")
    assert partial > 8
    assert sum(replayed) > 0
    assert probed > 0
    assert deviating == 0

    replayed.clear()
    before = Metrics().snapshot()
    ours = read(llm, texts(*LONGER), LONGER_LENGTHS)
    partial, probed, deviating = counts(before)
    pairs = zip(books.longer, ours, strict=True)
    print(
        f"{runner}, longer: {partial} partial steps, {sum(replayed)} of them replayed, "
        f"{deviating} of {probed} rows deviate; with plain vLLM's: {compare_runs(pairs)}"
    )
    assert partial > 15
    assert sum(replayed) > 10
    assert probed > 0
    assert own_stats()["committed_tokens"] > 0
    assert own_stats()["fallbacks"] == {}


# ---- mode `lossless`, the story model ----

STORIES = story_script()
# With as many passes as drafts every request that has a view drafts so many tokens. vLLM's runner
# V1 replays full graphs where all requests of a step do.
DRAFTS = SPECULATION["num_speculative_tokens"]
ALL_PASSES = {"specpv_draft_passes": DRAFTS}
VIEW = SMALL_VIEW | {"specpv_draft_passes": 3, "specpv_max_requests": STORIES.num_views}
# The head is wrong throughout, so that a pass gives a token.
HEAD_VIEW = VIEW | {"specpv_draft_lookup": 3, "specpv_draft_passes": 4}
HALF = {"dtype": "float16"}
EAGER = {"enforce_eager": True}
CROWD, SAMPLES = 256, 8192  # requests at once, and in all
CROWDED = EAGER | {
    "max_num_seqs": CROWD,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 512 << 20,
}


def draw(
    llm: Any,
    first_seed: int,
    prompt: list[int] | None = None,
    *,
    crowd: int = CROWD,
    samples: int = SAMPLES,
) -> list[list[int]]:
    """Four tokens of each of many requests, which differ in their seeds."""
    prompt, found = prompt or varied_prompt(153), []
    for first in range(first_seed, first_seed + samples, crowd):
        params = [greedy(4, temperature=1.0, seed=first + i) for i in range(crowd)]
        story = drive(llm, [prompt] * crowd, params)
        found += [story.tokens[str(i)] for i in range(crowd)]
    assert len(found) == samples
    assert all(len(tokens) == 4 for tokens in found)
    return found


def check_drawn(
    ours: list[list[int]], theirs: list[list[int]], places: list[slice], *, degrees: int
) -> None:
    """Tokens at these places follow one distribution, by chi-square of at least so many degrees.

    Seeds are fixed, so the verdict is.
    """
    for place in places:
        sides = [[tuple(tokens[place]) for tokens in side] for side in (ours, theirs)]
        statistic, found = chi_square.two_samples(*sides)
        limit = chi_square.quantile(found, deviations=3.72)
        print(f"tokens {place.start} to {place.stop - 1}: chi-square {statistic:.1f} of {found} "
              f"degrees, limit {limit:.1f}")  # fmt: skip
        assert found >= degrees
        assert statistic < limit


def check_confirmed(before: dict[str, Any], least: float) -> None:
    """Drafts over views since the snapshot `before`: at least such a share of them is right."""
    assert own_stats()["fallbacks"] == {}
    check_drafting(before)
    drafted, confirmed = (
        grown(before, f"specpv_{kind}_tokens_total") for kind in ("drafted", "confirmed")
    )
    passes = grown(before, "specpv_draft_passes_total")
    print(f"{confirmed} of {drafted} confirmed, {passes} passes")
    assert confirmed > least * drafted > 0


@dataclass
class Said:
    """What plain vLLM says: requests by name, and drawn tokens."""

    greedy: dict[str, Any]
    drawn: list[list[int]]


@pytest.fixture(scope="module")
def plain() -> Said:
    llm = stories_on_gpu(PLAIN, **(CROWDED | STOCK | HALF))
    outputs = drive(llm, STORIES.prompts, wanted()).outputs
    found = Said(outputs, draw(llm, 1 + SAMPLES))
    del llm
    release_engines()
    return found


def check_disturbed(
    name: str,
    script: Script,
    found: Disturbed,
    plain: dict[str, Any],
    before: dict[str, Any],
    *,
    least: float,
) -> RunComparison:
    """What must hold on any engine, and at least such a share of the drafts confirmed; how close
    its tokens are to plain vLLM's is returned."""
    check_confirmed(before, least)
    count = len(script.prompts)
    close = compare_runs((plain[str(i)], output) for i, output in found.outputs)
    calm = {str(i): list(output.token_ids) for i, output in found.outputs[:count]}
    together = {str(i): list(output.token_ids) for i, output in found.outputs[count : 2 * count]}
    share = alike(together, calm)
    print(
        f"{name}: {found.preemptions} preemptions, {found.cached} tokens of prompts were cached, "
        f"{found.cut} cut, {found.stops} stops, {own_engine().num_replays} steps were replayed\n"
        f"plain vLLM: {close}\npreempted as alone before a difference: {share:.2f}"
    )
    assert len(found.outputs) > 3 * count
    assert all(len(tokens) == MAX_TOKENS for tokens in calm.values())
    assert share > 0.5
    return close


def drafting(
    runner: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our settings and vLLM's options that draft over views on that model runner."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "v2" else "0")
    if runner == "v1":
        return VIEW, {"speculation": SPECULATION}
    head = story_head(folder, torch.float16)
    return HEAD_VIEW, {"speculation": head, "scheduler_cls": SCHEDULER}


@pytest.mark.parametrize("kind", ["v1-eager", "v1-graphs", "v2-eager", "v2-graphs"])
def test_what_happens_to_requests(
    plain: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Preempted, found in the prefix cache, aborted, stopped: tokens are plain vLLM's."""
    runner, _, graphs = kind.partition("-")
    nwor, options = drafting(runner, tmp_path, monkeypatch)
    if kind == "v1-graphs":
        nwor = nwor | ALL_PASSES
    if graphs == "graphs":
        options |= GRAPHS
    else:
        nwor, options = nwor | {"check_contract": True}, options | EAGER
    before = Metrics().snapshot()
    found = STORIES.run(stories_on_gpu(nwor, **(options | STORIES.options | HALF)))
    assert hasattr(own_engine().runner, "input_batch") is (runner == "v1")
    assert (own_engine().num_replays > 0) is (graphs == "graphs")
    if graphs == "eager":  # what runs in graphs cannot be watched
        assert own_engine().violations == []
    close = check_disturbed(kind, STORIES, found, plain.greedy, before, least=0.5)
    # Two computations of this model in float16 are 0.0015 apart on average, 0.024 at most.
    close.check(mean=0.005, most=0.1, share=0.5)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_drawn_tokens_keep_the_distribution(
    plain: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Lookups and passes on V1, head and passes in turns on V2: pairs of neighbours follow the
    distribution of plain vLLM's."""
    nwor, options = drafting(runner, tmp_path, monkeypatch)
    if runner == "v2":
        options["speculation"]["draft_sample_method"] = "probabilistic"
    before = Metrics().snapshot()
    llm = stories_on_gpu(nwor | {"specpv_max_requests": CROWD}, **(options | CROWDED | HALF))
    ours = draw(llm, 1)
    assert hasattr(own_engine().runner, "input_batch") is (runner == "v1")
    check_confirmed(before, 0.1)
    assert grown(before, "specpv_confirmed_tokens_total") < grown(
        before, "specpv_drafted_tokens_total"
    )
    check_drawn(ours, plain.drawn, [slice(i, i + 2) for i in range(3)], degrees=20)


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_drafting_changes_no_byte_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Full graphs: the target's caches before and after every proposal are equal bit by bit."""
    nwor, options = drafting(runner, tmp_path, monkeypatch)
    nwor = nwor | (ALL_PASSES if runner == "v1" else {}) | {"specpv_max_requests": 4}
    llm = stories_on_gpu(nwor, **(options | HALF | GRAPHS))
    long = [prompt for prompt in prompts() if len(prompt) > 100]  # all of them have views
    check_proposals(llm, long, monkeypatch, runner, least=0.3)


def check_proposals(
    llm: Any, long: list[list[int]], monkeypatch: pytest.MonkeyPatch, runner: str, *, least: float
) -> None:
    """Serves prompts that have views in graphs: no proposal writes to the target's caches, and at
    least such a share of the drafts is confirmed."""
    drive(llm, long[:1], greedy(2))  # caches are bound, and our side knows its runner
    assert hasattr(own_engine().runner, "input_batch") is (runner == "v1")
    proposals, before = ProposalWriteWatch(monkeypatch), Metrics().snapshot()
    replays = own_engine().num_replays
    story = drive(llm, long, greedy(MAX_TOKENS), arrivals=[0, 0, 3, 3])
    assert all(len(tokens) == MAX_TOKENS for tokens in story.tokens.values())
    assert own_engine().num_replays > replays
    proposals.check()
    check_confirmed(before, least)
