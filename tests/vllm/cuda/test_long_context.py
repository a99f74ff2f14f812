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

from nwor_specpv import Metrics
from nwor_specpv.models import smollm2
from support.book_texts import (
    BOOK_OPTIONS,
    BOOK_VIEW,
    COVERED,
    LENGTHS,
    LONGER,
    LONGER_LENGTHS,
    read,
    texts,
)
from support.compare_runs import compare_runs, errors_against_float32
from support.disturbances import stories as story_script
from support.disturbances import wanted
from support.engines import NGRAM, drive, own_engine, release_engines
from support.engines import stats as own_stats
from support.gpu_checks import (
    CROWD,
    SAMPLES,
    Said,
    check_confirmed,
    check_disturbed,
    check_drawn,
    check_log_probabilities,
    check_proposals,
    draw,
    watch_replays,
)
from support.gpu_engines import (
    EAGER,
    GRAPHS,
    LOOKUPS,
    PLAIN,
    SCHEDULER,
    STOCK,
    all_kinds,
    begin,
    both_guesses,
    both_runners,
    check_runner,
    choose_runner,
    smollm2_head,
    stories_on_gpu,
)
from support.heads import story_head
from support.metric_counts import grown
from support.small_views import SMALL_VIEW, cover_all, prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


# ---- mode `refresh`, SmolLM2 over a book ----


@dataclass
class Books:
    """What plain vLLM says."""

    covered: list[Any]
    longer: list[Any]


@pytest.fixture(scope="module")
def books() -> Books:
    llm = begin(PLAIN, model=str(smollm2("bfloat16")), **(BOOK_OPTIONS | STOCK | GRAPHS))
    found = Books(read(llm, texts(*COVERED), LENGTHS), read(llm, texts(*LONGER), LONGER_LENGTHS))
    del llm
    release_engines()
    return found


def counts(before: dict[str, Any]) -> tuple[int, int, int]:
    """Partial steps of requests, rows in which drift was looked for, and those that differ."""
    names = ("partial_steps", "probed_rows", "deviating_rows")
    partial, probed, deviating = (grown(before, f"specpv_{name}_total") for name in names)
    return partial, probed, deviating


@both_runners("refresh")
def test_refresh_reads_a_book(
    books: Books, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Full graphs, mixed lengths; V1 drafts by n-grams, V2 with the shipped head.

    Partial steps over views that hold everything give plain vLLM's log-probabilities; then texts
    that outgrow the view.
    """
    from nwor_specpv.vllm.specpv import drift

    choose_runner(monkeypatch, runner)
    replayed = watch_replays(monkeypatch)
    speculation = smollm2_head(tmp_path) if runner == "v2" else NGRAM
    model = {"model": str(smollm2("bfloat16")), "speculation": speculation}
    llm = begin(BOOK_VIEW, **(model | BOOK_OPTIONS | GRAPHS))
    monkeypatch.setattr(drift, "_READ_INTERVAL", 1)

    with monkeypatch.context() as patch:
        cover_all(patch, tokens=256)
        before = Metrics().snapshot()
        ours = read(llm, texts(*COVERED), LENGTHS)
    check_runner(runner)
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


@pytest.mark.serves("refresh", "V2")
def test_refresh_over_a_float8_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full graphs, with the shipped head. Over views that hold everything log-probabilities are as
    close to float32 as plain vLLM's over such a cache; then texts that outgrow the view."""
    from nwor_specpv.vllm.specpv import drift

    choose_runner(monkeypatch, "v2")
    replayed = watch_replays(monkeypatch)
    options = BOOK_OPTIONS | GRAPHS | {"kv_cache_dtype": "fp8", "max_num_seqs": 4}
    options["model"] = str(smollm2("bfloat16"))
    params = [wanted(length) for length in LENGTHS]
    llm = begin(PLAIN, **(options | STOCK))
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer(text).input_ids for text in texts(*COVERED)]
    plain = drive(llm, prompts, params).outputs
    del llm
    release_engines()
    llm = begin(BOOK_VIEW, speculation=smollm2_head(tmp_path), **options)
    monkeypatch.setattr(drift, "_READ_INTERVAL", 1)

    with monkeypatch.context() as patch:
        cover_all(patch, tokens=256)
        before = Metrics().snapshot()
        ours = drive(llm, prompts, params).outputs
    check_runner("v2")
    caches = [own_engine().layers[name].kv_cache for name in own_engine().own_layers]
    assert {cache.dtype for cache in caches} == {torch.uint8}
    partial, probed, deviating = counts(before)
    told = [(prompts[int(name)], plain[name], ours[name]) for name in plain]
    errors = errors_against_float32(smollm2("bfloat16"), told)
    print(
        f"all in view: {partial} partial steps, {sum(replayed)} of them replayed, {deviating} of "
        f"{probed} rows deviate; errors against float32, beside plain vLLM's: {errors}"
    )
    assert partial > 8
    assert sum(replayed) > 0
    assert probed > 0
    assert deviating == 0
    assert len(errors.got) > 60
    assert errors.ratio < 1.25

    replayed.clear()
    before = Metrics().snapshot()
    longer = [tokenizer(text).input_ids for text in texts(*LONGER)]
    story = drive(llm, longer, [wanted(length) for length in LONGER_LENGTHS])
    assert [len(story.tokens[str(i)]) for i in range(len(longer))] == list(LONGER_LENGTHS)
    partial, probed, deviating = counts(before)
    print(f"longer: {partial} partial steps, {sum(replayed)} of them replayed, {deviating} of "
          f"{probed} rows deviate")  # fmt: skip
    assert partial > 15
    assert sum(replayed) > 10
    assert own_stats()["committed_tokens"] > 0
    assert own_stats()["fallbacks"] == {}


# ---- mode `lossless`, the story model ----

STORIES = story_script()
VIEW = SMALL_VIEW | {"specpv_draft_passes": 3, "specpv_max_requests": STORIES.num_views}
# The head is wrong throughout, so that a pass gives a token.
HEAD_VIEW = VIEW | {"specpv_draft_lookup": 3, "specpv_draft_passes": 4}
HALF = {"dtype": "float16"}
CROWDED = EAGER | {
    "max_num_seqs": CROWD,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": 512 << 20,
}


@pytest.fixture(scope="module")
def plain() -> Said:
    llm = stories_on_gpu(PLAIN, **(CROWDED | STOCK | HALF))
    outputs = drive(llm, STORIES.prompts, wanted()).outputs
    found = Said(outputs, draw(llm, 1 + SAMPLES))
    del llm
    release_engines()
    return found


def drafting(
    guesses: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our settings and vLLM's options that draft over views."""
    choose_runner(monkeypatch, "v2")
    if guesses == "lookups":
        return VIEW, {"speculation": dict(LOOKUPS), "scheduler_cls": SCHEDULER}
    head = story_head(folder, torch.float16)
    return HEAD_VIEW, {"speculation": head, "scheduler_cls": SCHEDULER}


@all_kinds
def test_what_happens_to_requests(
    plain: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Preempted, found in the prefix cache, aborted, stopped: tokens are plain vLLM's."""
    guesses, _, graphs = kind.partition("-")
    nwor, options = drafting(guesses, tmp_path, monkeypatch)
    if graphs == "graphs":
        options |= GRAPHS
    else:
        nwor, options = nwor | {"check_contract": True}, options | EAGER
    before = Metrics().snapshot()
    found = STORIES.run(stories_on_gpu(nwor, **(options | STORIES.options | HALF)))
    check_runner("v2")
    assert (own_engine().num_replays > 0) is (graphs == "graphs")
    if graphs == "eager":  # what runs in graphs cannot be watched
        assert own_engine().violations == []
    close = check_disturbed(kind, STORIES, found, plain.greedy, before, least=0.5)
    # Two computations of this model in float16 are 0.0015 apart on average, 0.024 at most.
    close.check(mean=0.005, most=0.1, share=0.5)


@both_guesses
def test_drawn_tokens_keep_the_distribution(
    plain: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guesses: str
) -> None:
    """Pairs of neighbours follow the distribution of plain vLLM's."""
    nwor, options = drafting(guesses, tmp_path, monkeypatch)
    options["speculation"]["draft_sample_method"] = "probabilistic"
    before = Metrics().snapshot()
    llm = stories_on_gpu(nwor | {"specpv_max_requests": CROWD}, **(options | CROWDED | HALF))
    ours = draw(llm, 1)
    check_runner("v2")
    check_confirmed(before, 0.1)
    assert grown(before, "specpv_confirmed_tokens_total") < grown(
        before, "specpv_drafted_tokens_total"
    )
    check_drawn(ours, plain.drawn, [slice(i, i + 2) for i in range(3)], degrees=20)


@both_guesses
def test_drafting_changes_no_byte_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guesses: str
) -> None:
    """Full graphs: the target's caches before and after every proposal are equal bit by bit."""
    nwor, options = drafting(guesses, tmp_path, monkeypatch)
    llm = stories_on_gpu(nwor | {"specpv_max_requests": 4}, **(options | HALF | GRAPHS))
    long = [prompt for prompt in prompts() if len(prompt) > 100]  # all of them have views
    check_proposals(llm, long, monkeypatch, least=0.3)
