"""Partial views in the real vLLM on a GPU: drafting over them, and verify steps in graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nwor_specpv import Metrics
from nwor_specpv.models import smollm2, stories
from support.disturbances import ASKED, BOOK
from support.engine_process import run_job
from support.engines import NGRAM, check_drafting, drive, greedy, own_engine
from support.engines import stats as own_stats
from support.gpu_checks import alike, check_log_probabilities
from support.gpu_engines import (
    GRAPHS,
    LOOKUPS,
    MODES,
    REFRESH,
    SCHEDULER,
    SERVES,
    TURN,
    VIEW_OF_400,
    begin,
    both_guesses,
    both_modes,
    check_runner,
    choose_runner,
    dummy_prompts,
    eagle3,
    smollm2_head,
)
from support.heads import story_head
from support.metric_counts import grown
from support.small_views import SMALL_VIEW, prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

VIEW = SMALL_VIEW | {"specpv_draft_passes": 3}


@SERVES["lookups"]
def test_the_target_drafts_over_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """On model runner V2, which vLLM chooses by itself."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    model = {"model": str(stories(64)), "skip_tokenizer_init": True, "enforce_eager": True}
    plain = begin({"enable_nwor": False}, speculation=None, attention_backend="FLASH_ATTN", **model)
    theirs = drive(plain, prompts(), greedy(48)).tokens
    before = Metrics().snapshot()
    nwor = VIEW | {"check_contract": True}
    llm = begin(nwor, speculation=LOOKUPS, scheduler_cls=SCHEDULER, **model)
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    ours = drive(llm, prompts(), greedy(48)).tokens
    check_runner("v2")
    assert own_engine().violations == []
    assert own_stats()["fallbacks"] == {}
    check_drafting(before)
    drafted = grown(before, "specpv_drafted_tokens_total")
    confirmed = grown(before, "specpv_confirmed_tokens_total")
    share = alike(ours, theirs)
    print(f"{confirmed} of {drafted} confirmed; like plain vLLM before a difference: {share:.2f}")
    assert confirmed > 0.5 * drafted > 0
    assert share > 0.3  # bfloat16: another number of rows rounds otherwise


@SERVES["head"]
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", ["eager", *MODES])
def test_head_and_target_draft_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, sampled: bool
) -> None:
    """Model runner V2. The head is wrong throughout, so a pass gives a token; most are right."""
    choose_runner(monkeypatch, "v2")
    graphs = mode != "eager"
    model = {"model": str(stories(64)), "skip_tokenizer_init": True}
    model |= MODES[mode] if graphs else {"enforce_eager": True}
    head = story_head(tmp_path)
    params = greedy(48, temperature=1.0, seed=3) if sampled else greedy(48)
    if sampled:
        head["draft_sample_method"] = "probabilistic"
    else:
        stock = {"enable_nwor": False}
        plain = begin(stock, speculation=head, attention_backend="FLASH_ATTN", **model)
        theirs = drive(plain, prompts(), params).tokens
        del plain
    before = Metrics().snapshot()
    nwor = VIEW | {"specpv_draft_lookup": 3, "specpv_draft_passes": 4}
    nwor |= {} if graphs else {"check_contract": True}
    llm = begin(nwor, speculation=head, scheduler_cls=SCHEDULER, **model)
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    ours = drive(llm, prompts(), params, arrivals=[0, 0, 3, 3, 9, 12]).tokens
    check_runner("v2")
    assert all(len(tokens) == 48 for tokens in ours.values())
    assert own_engine().violations == []
    assert own_stats()["fallbacks"] == {}
    check_drafting(before)
    assert (own_engine().num_replays > 0) is graphs
    drafted = grown(before, "specpv_drafted_tokens_total")
    confirmed = grown(before, "specpv_confirmed_tokens_total")
    print(f"{confirmed} of {drafted} confirmed")
    assert confirmed > (0.3 if sampled else 0.5) * drafted > 0
    if not sampled:
        share = alike(ours, theirs)
        print(f"like vLLM's own before a difference: {share:.2f}")
        assert share > 0.3  # bfloat16: another attention kernel rounds otherwise


@both_modes
@both_guesses
def test_smollm2_reads_a_book(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guesses: str, mode: str
) -> None:
    """Mixed lengths, in graphs; guesses are looked up, or the shipped head's."""
    book = BOOK.read_text()
    texts = (f"{book[:9000]}\n\nContinue.", ASKED.format(book[9000:15000]), "Name ten animals.")
    texts = [TURN.format(text) for text in texts]
    choose_runner(monkeypatch, "v2")
    speculation = smollm2_head(tmp_path, 12) if guesses == "head" else LOOKUPS
    model = {"model": str(smollm2("bfloat16")), "max_model_len": 4096}
    model |= {"max_num_batched_tokens": 4096, "kv_cache_memory_bytes": 512 << 20} | MODES[mode]
    stock = {"speculation": None, "attention_backend": "FLASH_ATTN"}
    before, sides = Metrics().snapshot(), []
    for nwor, options in (
        ({"enable_nwor": False}, stock),
        (VIEW_OF_400, {"speculation": speculation, "scheduler_cls": SCHEDULER}),
    ):
        llm = begin(nwor, **(model | options))
        outputs = llm.generate(texts, greedy(64, logprobs=1), use_tqdm=False)
        sides.append([output.outputs[0] for output in outputs])
        lengths = [len(side.token_ids) for side in sides[-1]]
        free = torch.cuda.mem_get_info()[0] >> 30
        print(f"{guesses}, {nwor}: {lengths} tokens, {free} GiB are free", flush=True)
        if nwor is VIEW_OF_400:
            check_runner("v2")
            assert own_engine().draft_failures.latest == ""
            check_stop_strings(llm, texts, sides[-1])
        del llm
    check_drafting(before)
    assert own_stats()["fallbacks"] == {}
    drafted = grown(before, "specpv_drafted_tokens_total")
    confirmed = grown(before, "specpv_confirmed_tokens_total")
    replays = own_engine().num_replays
    print(f"{guesses}: {confirmed} of {drafted} confirmed, {replays} steps were replayed")
    assert confirmed > 0.5 * drafted > 0
    assert replays > 0
    check_log_probabilities(*sides, guesses)


def check_stop_strings(llm: Any, texts: list[str], outputs: list[Any]) -> None:
    """Prompts again, which are in the prefix cache: requests end at a word of their own text, amid
    what a step gave, and nothing comes behind it."""
    long = [[word for word in output.text.split()[1:] if len(word) > 3] for output in outputs]
    words = [found[len(found) // 3] if found else "nothing" for found in long]
    params = [greedy(64, stop=[word]) for word in words]
    again = llm.generate(texts, params, use_tqdm=False)
    assert again[0].num_cached_tokens > 1000
    ended = []
    for word, before, (found,) in zip(words, outputs, (o.outputs for o in again), strict=True):
        assert word not in found.text
        if found.finish_reason == "stop":
            assert found.stop_reason == word
            ended.append(before.text.startswith(found.text))
        else:
            assert len(found.token_ids) == 64
    print(f"{words}: {len(ended)} requests have ended there, {sum(ended)} as before")
    assert any(ended)


def long_prompts() -> list[list[int]]:
    lengths = (300, 500, 700, 40, 90, 400)
    return [(p * 140)[:n] for p, n in zip(dummy_prompts(), lengths, strict=True)]


@pytest.mark.serves("refresh", "V2")
@both_modes
def test_refresh_in_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """One graph for every mix of full and partial requests, drift counted on the device."""
    choose_runner(monkeypatch, "v2")
    before = Metrics().snapshot()
    llm = eagle3(tmp_path, REFRESH, enable_prefix_caching=False, **MODES[mode])
    story = drive(llm, long_prompts(), greedy(120))
    assert all(len(tokens) == 120 for tokens in story.tokens.values())
    # By default vLLM takes a piecewise graph of 32 rows for six requests, not a full one of 35.
    assert own_engine().num_replays > (20 if mode == "graphs" else 0)
    assert own_stats()["fallbacks"] == {}
    assert grown(before, "specpv_partial_steps_total") > 50
    probed = grown(before, "specpv_probed_rows_total")
    deviating = grown(before, "specpv_deviating_rows_total")
    print(f"{deviating} of {probed} probed rows deviate")
    assert probed > 0
    check_runner("v2")


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("refresh-v1", marks=pytest.mark.serves("refresh", "V1")),
        pytest.param("refresh-v2", marks=pytest.mark.serves("refresh", "V2")),
        *(pytest.param(name, marks=mark) for name, mark in SERVES.items()),
    ],
)
@pytest.mark.alone
def test_views_where_vllm_finds_the_size_of_its_caches(tmp_path: Path, kind: str) -> None:
    """vLLM then captures graphs on caches of few blocks, and makes others afterwards: on model
    runner V1, and from 0.32 on V2.

    In a process of its own: what engines before it have left is freed while vLLM measures, which
    it does not allow. Nobody else may use the GPU meanwhile.
    """
    refresh, runner = kind.startswith("refresh"), "v1" if kind == "refresh-v1" else "v2"
    nwor = (SMALL_VIEW | {"specpv_mode": "refresh"}) if refresh else VIEW
    guesses = {"refresh-v1": NGRAM, "lookups": LOOKUPS}.get(kind) or story_head(tmp_path)
    options = {"model": str(stories(64)), "skip_tokenizer_init": True, "speculation": guesses}
    options |= {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.1}
    options |= {"dtype": "bfloat16", "attention_backend": "CUSTOM", "enable_prefix_caching": False}
    options |= {} if refresh else {"scheduler_cls": SCHEDULER}
    job = {"start": {"nwor": nwor} | options | GRAPHS, "prompts": prompts(), "max_tokens": 48}
    found = run_job(tmp_path, job, VLLM_USE_V2_MODEL_RUNNER=str(int(runner == "v2")))
    assert [len(tokens) for tokens in found["tokens"]] == [48] * len(prompts())
    (rank,) = found["ranks"]
    assert rank["stats"]["fallbacks"] == {}
    assert rank["stats"]["staged_tokens"] > 0
    assert rank["stats"]["committed_tokens"] > 0 or kind == "refresh-v2"  # the head knows nothing
    assert rank["views_are_of_the_caches"]


@pytest.mark.parametrize("route", ["", "cuda"], ids=["automatic", "own_attention"])
def test_refresh_with_views_of_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """Eager: over such views each layer's output is that over the whole context, bit by bit, and
    tokens are those of full attention by the same kernels."""
    from nwor_specpv.vllm.specpv import refresh

    choose_runner(monkeypatch, "v2")
    after, compared = refresh.RefreshStep.after, []

    def watched(self: Any, layer: str, attend: Any, query: Any, output: Any) -> None:
        if (self.views.store.num_blocks[: self.count] >= 0).any():
            sides = (side.view(torch.int16) for side in (output, attend(None)))
            compared.append(torch.equal(*sides))
        after(self, layer, attend, query, output)

    monkeypatch.setattr(refresh.RefreshStep, "after", watched)
    # Chosen once, when all blocks between sink and window fit; what comes after is the tail.
    views = REFRESH | {"specpv_n_retrieval_blocks": 20, "specpv_n_spec_tokens_buf": 100}
    views |= {"specpv_full_refresh_interval": 0, "attention_route": route}
    runs = []
    for nwor in ({"attention_route": "cuda", "strict": True}, views):
        llm = eagle3(tmp_path, nwor, enable_prefix_caching=False, enforce_eager=True)
        story = drive(llm, [p[:401] for p in long_prompts()[1:3]], greedy(40, seed=5))
        runs.append(story.tokens)
        check_runner("v2")
        del llm
    print(f"{len(compared)} outputs compared, {compared.count(False)} differ")
    assert len(compared) > 20
    assert all(compared)
    assert runs[0] == runs[1]
