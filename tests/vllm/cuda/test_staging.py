"""The real vLLM on a GPU: FlashAttention with our write and our attention, both model runners.

Exact comparisons are between staged and direct runs of the same kernels: in bfloat16 another
attention kernel rounds otherwise, so against vLLM's own only most tokens are alike.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from vllm.plugins import load_general_plugins

from nwor_specpv.models import smollm2, stories
from support.configs import HYBRID, MTP, WINDOW
from support.engines import NGRAM, drive, greedy, own_engine, story_prompts
from support.engines import stats as own_stats
from support.gpu_checks import alike, check_log_probabilities
from support.gpu_engines import (
    GRAPHS,
    MODES,
    TURN,
    begin,
    both_modes,
    both_runners,
    check_runner,
    choose_runner,
    dummy_prompts,
    eagle3,
    smollm2_head,
    stories_on_gpu,
    write_config,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CHECKED = {"check_contract": True, "strict": True}  # eager: the checker sees every write
STRICT = {"strict": True}
# Staging takes nothing, so every round is written directly; graphs are captured all the same.
DIRECT = {"max_staging_bytes": 1}


def check_books(runner: str, *, graphs: bool) -> dict:
    check_runner(runner)
    stats = own_stats()
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"]
    assert stats["committed_tokens"] > 0
    assert stats["rejected_tokens"] > 0
    assert stats["fallbacks"] == {}
    assert own_engine().violations == []
    assert (own_engine().num_replays > 0) is graphs
    return stats


@pytest.mark.serves("staging", "V1")
@pytest.mark.parametrize("route", ["", "cuda"], ids=["flash_prefix", "own_attention"])
def test_v1_keeps_the_contract(monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    """Eager, with prefills behind verifying requests and prefix hits; every byte is checked."""
    choose_runner(monkeypatch, "v1")
    nwor = CHECKED | {"attention_route": route}
    llm = stories_on_gpu(nwor, enforce_eager=True, max_num_batched_tokens=48)
    drive(llm, story_prompts(6), greedy(48), arrivals=[0, 1, 3, 3, 7, 12])
    drive(llm, story_prompts(6), greedy(24))
    check_books("v1", graphs=False)


@pytest.mark.serves("staging", "V1")
@both_modes
def test_v1_in_graphs_is_what_direct_writes_give(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    choose_runner(monkeypatch, "v1")
    runs = {}
    for name, nwor in (("direct", DIRECT), ("staged", STRICT)):
        llm = stories_on_gpu(nwor, **MODES[mode])
        runs[name] = drive(llm, story_prompts(6), greedy(), arrivals=[0, 0, 0, 9, 9, 30]).tokens
    check_books("v1", graphs=True)
    assert runs["staged"] == runs["direct"]
    stock = begin(
        {"enable_nwor": False},
        model=str(stories(64)),
        skip_tokenizer_init=True,
        attention_backend="FLASH_ATTN",
        **MODES[mode],
    )
    theirs = drive(stock, story_prompts(6), greedy(), arrivals=[0, 0, 0, 9, 9, 30]).tokens
    share = alike(runs["staged"], theirs)
    print(f"tokens like vLLM's own before the first difference: {share:.2f}")
    assert share > 0.3


def test_v1_starts_with_more_rows_in_a_graph_than_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The smallest graph has nine rows; vLLM then tries its sampler on four requests."""
    choose_runner(monkeypatch, "v1")
    speculation = NGRAM | {"num_speculative_tokens": 8}
    llm = stories_on_gpu(STRICT, speculation=speculation, max_num_seqs=4, **GRAPHS)
    story = drive(llm, story_prompts(4), greedy(60))
    assert all(len(tokens) == 60 for tokens in story.tokens.values())
    check_runner("v1")
    assert own_stats()["staged_tokens"] > 0
    assert own_stats()["fallbacks"] == {}


# ---- windows, and models that predict further tokens themselves ----


@pytest.mark.parametrize("kind", ["window", "hybrid"])
def test_windows_are_what_direct_writes_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Model runner V1, made-up weights in full graphs, requests with and without drafts in one
    step."""
    choose_runner(monkeypatch, "v1")
    config = {"window": WINDOW, "hybrid": HYBRID}[kind] | {"torch_dtype": "bfloat16"}
    config |= {"head_dim": 64, "query_pre_attn_scalar": 64}  # of which our attention has kernels
    model = {"model": str(write_config(tmp_path, config)), "load_format": "dummy"}
    runs = []
    for nwor in (DIRECT, STRICT):
        llm = begin(nwor, **model, skip_tokenizer_init=True, **GRAPHS)
        story = drive(llm, story_prompts(6), greedy(60), arrivals=[0, 0, 3, 3, 9, 30])
        runs.append(story.tokens)
    check_runner("v1")
    stats = own_stats()
    assert runs[0] == runs[1]
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"] > 0
    assert stats["fallbacks"] == {}
    assert stats["groups"] == (2 if kind == "hybrid" else 1)
    assert len(own_engine().own_layers) == config["num_hidden_layers"]


def test_mtp_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model runner V1."""
    choose_runner(monkeypatch, "v1")
    config = MTP | {"torch_dtype": "bfloat16", "hidden_size": 256, "head_dim": 64}
    model = {"model": str(write_config(tmp_path, config))}
    model |= {"load_format": "dummy", "skip_tokenizer_init": True}
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    llm = begin(CHECKED, speculation=speculation, enforce_eager=True, **model)
    drive(llm, story_prompts(6), greedy(40), arrivals=[0, 1, 3, 3, 7, 12])
    check_runner("v1")
    assert own_stats()["staged_tokens"] > 0
    assert own_stats()["fallbacks"] == {}
    assert own_engine().violations == []
    assert len(own_engine().own_layers) == MTP["num_hidden_layers"]


# ---- dummy weights at a real model's shapes, EAGLE3 and the V2 runner ----


@pytest.mark.serves("staging", "V2")
def test_v2_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_runner(monkeypatch, "v2")
    llm = eagle3(tmp_path, CHECKED, enforce_eager=True, max_num_batched_tokens=128)
    drive(llm, dummy_prompts(), greedy(40), arrivals=[0, 1, 3, 3, 7, 12])
    check_books("v2", graphs=False)


@both_runners("staging")
def test_a_block_that_is_hit_in_the_step_that_fills_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Both prompts have as many rows to run as a verify step, for which there is a full graph.

    Whatever the cache held before, nobody reads it. Where a head drafts, vLLM computes the last
    block that is hit again.
    """
    choose_runner(monkeypatch, runner)
    blocks = 1 if runner == "v1" else 2
    drafts = 16 * blocks - 1
    text = [3 + 7 * place % 500 for place in range(16 + 16 * blocks)]
    runs = []
    for poison in (30.0, -30.0):
        if runner == "v1":
            speculation = NGRAM | {"num_speculative_tokens": drafts}
            llm = stories_on_gpu(STRICT, speculation=speculation, **GRAPHS)
        else:
            llm = eagle3(tmp_path, STRICT, drafts=drafts, **GRAPHS)
        for layer in own_engine().layers.values():
            layer.kv_cache.fill_(poison)
        story = drive(llm, [text[: 16 * blocks], text], greedy(60))
        assert (story.cached["0"], story.cached["1"]) == (0, 16)
        check_books(runner, graphs=True)
        runs.append(story.tokens)
    assert runs[0] == runs[1]


def test_a_float8_cache_is_staged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention attends to codes, rows in flight are exact, and commits quantise them."""
    choose_runner(monkeypatch, "v2")
    llm = eagle3(tmp_path, CHECKED, enforce_eager=True, kv_cache_dtype="fp8")
    drive(llm, dummy_prompts(), greedy(40), arrivals=[0, 1, 3, 3, 7, 12])
    check_books("v2", graphs=False)
    runs = []
    for nwor in (DIRECT, STRICT):
        llm = eagle3(tmp_path, nwor, kv_cache_dtype="fp8", **GRAPHS)
        runs.append(drive(llm, dummy_prompts(), greedy(40)).tokens)
    check_books("v2", graphs=True)
    assert runs[0] == runs[1]


def test_a_float8_cache_is_left_to_vllm_by_our_own_attention(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Said at start, layer by layer; the engine serves, and nothing is staged."""
    load_general_plugins()  # which sets our logger's level as vLLM's
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        nwor = {"attention_route": "cuda"}
        llm = eagle3(tmp_path, nwor, enforce_eager=True, kv_cache_dtype="fp8")
    assert "leaves a layer to vLLM: it has a quantised KV cache" in caplog.text
    story = drive(llm, dummy_prompts(), greedy(20))
    assert all(len(tokens) == 20 for tokens in story.tokens.values())
    assert own_engine().interceptor is None


@pytest.mark.serves("staging", "V2")
@both_modes
def test_v2_in_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    choose_runner(monkeypatch, "v2")
    llm = eagle3(tmp_path, STRICT, **MODES[mode])
    assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling
    story = drive(llm, dummy_prompts(), greedy(60))
    assert all(len(tokens) == 60 for tokens in story.tokens.values())
    stats = check_books("v2", graphs=True)
    # Two of four drafts are accepted on average; the last step of a request may be cut short.
    assert 0.3 < stats["committed_tokens"] / stats["staged_tokens"] < 0.7


# ---- SmolLM2, real weights ----

CHATS = (
    "Write the numbers from one to twenty in words, twice.",
    "Repeat three times: the quick brown fox jumps over the lazy dog.",
    "Name ten animals, one per line. Then name them again in the same order.",
    "What is the capital of France?",
)


@both_modes
@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_smollm2_gives_vllms_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, mode: str
) -> None:
    """bfloat16; n-grams on model runner V1, the shipped head on V2."""
    runner = "v1" if method == "ngram" else "v2"
    choose_runner(monkeypatch, runner)
    prompts = [TURN.format(chat) for chat in CHATS]
    speculation = NGRAM if method == "ngram" else smollm2_head(tmp_path)
    sides = []
    for backend, nwor in (("FLASH_ATTN", {"enable_nwor": False}), ("CUSTOM", STRICT)):
        model = {"model": str(smollm2("bfloat16")), "attention_backend": backend}
        llm = begin(nwor, speculation=speculation, **model, **MODES[mode])
        outputs = llm.generate(prompts, greedy(96, logprobs=1), use_tqdm=False)
        sides.append([output.outputs[0] for output in outputs])
    check_runner(runner)
    assert own_engine().num_replays > 0
    assert own_stats()["rejected_tokens"] > 0
    assert own_stats()["fallbacks"] == {}
    check_log_probabilities(*sides, method)
    committed = own_stats()["committed_tokens"]
    print(f"{committed} drafts were right")
    assert committed > 40
