"""Mode `lossless` in the real vLLM on a GPU with SmolLM2: what happens to requests, every write of
its steps checked, its caches around proposals, and tokens that are drawn.

Prompts are passages of a book, code and questions, one of them about the beginning of its text.
What plain vLLM gives is computed once; `compare_runs.py` says what may differ. float16 rounds eight
times finer than bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nwor_specpv import Metrics
from nwor_specpv.models import smollm2
from support.compare_runs import (
    RunComparison,
    RunErrors,
    compare_runs,
    errors_against_float32,
)
from support.disturbances import ASKED, BOOK, CODE, Script, passages, wanted
from support.engines import NGRAM, drive, own_engine, release_engines
from support.gpu_checks import (
    Said,
    check_confirmed,
    check_disturbed,
    check_drawn,
    check_filtered,
    check_proposals,
    draw,
)
from support.gpu_engines import (
    DRAFTS,
    EAGER,
    GRAPHS,
    LOOKUPS,
    MODES,
    PLAIN,
    SCHEDULER,
    STOCK,
    TURN,
    VIEW_OF_400,
    begin,
    both_guesses,
    both_modes,
    check_runner,
    choose_runner,
    smollm2_head,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ROOM = {"max_model_len": 2048, "max_num_batched_tokens": 8192}


def model(dtype: str) -> dict[str, Any]:
    return {
        "model": str(smollm2("bfloat16")),
        "dtype": dtype,
        "kv_cache_memory_bytes": 1 << 30,
    }


def drafting(
    guesses: str, folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> dict[str, Any]:
    """vLLM's options with which SmolLM2 drafts over views: by passes in turns with lookups, or with
    the shipped head."""
    choose_runner(monkeypatch, "v2")
    speculation = smollm2_head(folder, DRAFTS) if guesses == "head" else dict(LOOKUPS)
    return model(dtype) | {"speculation": speculation, "scheduler_cls": SCHEDULER}


# ---- what happens to requests ----


@dataclass
class Passages:
    """What plain vLLM says."""

    script: Script
    dtype: str
    greedy: dict[str, Any]

    def compared(self, outputs: list[tuple[int, Any]]) -> RunComparison:
        return compare_runs((self.greedy[str(i)], output) for i, output in outputs)

    def errors(self, outputs: list[tuple[int, Any]]) -> RunErrors:
        """Against float32, beside plain vLLM's at the same places."""
        told = [(self.script.prompts[i], self.greedy[str(i)], output) for i, output in outputs]
        return errors_against_float32(smollm2("bfloat16"), told)


def stock_smollm2(dtype: str, **options: Any) -> Any:
    """vLLM's own, with room for everything."""
    return begin(PLAIN, **(model(dtype) | ROOM | STOCK | GRAPHS | options))


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def read_passages(request: pytest.FixtureRequest) -> Passages:
    llm = stock_smollm2(request.param)
    script = passages(llm.get_tokenizer())
    found = Passages(script, request.param, drive(llm, script.prompts, wanted()).outputs)
    del llm
    release_engines()
    return found


def stock_speculation(
    passages: Passages, backend: str, speculation: dict[str, Any]
) -> list[tuple[int, Any]]:
    """What vLLM's own speculative decoding gives with one of its attention backends."""
    llm = stock_smollm2(passages.dtype, attention_backend=backend, speculation=speculation)
    prompts = passages.script.prompts
    found = [(int(i), output) for i, output in drive(llm, prompts, wanted()).outputs.items()]
    for i, prompt in enumerate(prompts):
        found.append((i, drive(llm, [prompt], wanted()).outputs["0"]))
    del llm
    release_engines()
    return found


@both_guesses
def test_what_happens_to_requests_of_smollm2(
    read_passages: Passages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guesses: str
) -> None:
    """Full graphs: preempted, found in the prefix cache, aborted, stopped.

    Tokens are plain vLLM's up to where two were all but equally likely. Log-probabilities are as
    close to float32 as plain vLLM's, and as close to these as vLLM's own speculative decoding with
    another of its attention backends: with the same one most places are equal bit by bit.
    """
    script = read_passages.script
    options = drafting(guesses, tmp_path, monkeypatch, read_passages.dtype)
    stock = options["speculation"] if guesses == "head" else NGRAM
    with monkeypatch.context() as patch:
        choose_runner(patch, "v2" if guesses == "head" else "v1")  # not every V2 has n-grams
        theirs = {
            backend: stock_speculation(read_passages, backend, stock)
            for backend in ("FLASH_ATTN", "TRITON_ATTN")
        }
    before = Metrics().snapshot()
    views = {"specpv_max_requests": script.num_views}
    llm = begin(VIEW_OF_400 | views, **(options | script.options | GRAPHS))
    found = script.run(llm)
    check_runner("v2")
    assert own_engine().num_replays > 0
    # A chain ends at its first wrong token: of eight, each right nine times in ten, five are.
    name = f"SmolLM2, {guesses}, {read_passages.dtype}"
    close = check_disturbed(name, script, found, read_passages.greedy, before, least=0.25)
    del llm
    release_engines()
    errors = read_passages.errors(found.outputs)
    print(f"errors against float32, beside plain vLLM's: {errors}")
    for backend, outputs in theirs.items():
        print(f"vLLM's own speculation, {backend}: {read_passages.compared(outputs)}")
        print(f"errors against float32: {read_passages.errors(outputs)}")
    assert len(errors.got) > 300
    assert errors.ratio < 1.25
    other = read_passages.compared(theirs["TRITON_ATTN"])
    if read_passages.dtype == "float16":  # eight times finer
        close.check(mean=min(0.005, 1.25 * other.mean), most=0.1, share=0.5)
    else:
        close.check(mean=1.25 * other.mean)


@both_guesses
def test_float8_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guesses: str) -> None:
    """Views, passes and tails over quantised pages, in full graphs: log-probabilities are as close
    to float32 as plain vLLM's over such a cache."""
    cache = {"kv_cache_dtype": "fp8", "max_num_seqs": 8}
    options = drafting(guesses, tmp_path, monkeypatch, "bfloat16") | ROOM | GRAPHS | cache
    llm = stock_smollm2("bfloat16", **cache)
    script = passages(llm.get_tokenizer())
    plain = Passages(script, "bfloat16", drive(llm, script.prompts, wanted()).outputs)
    del llm
    release_engines()
    before = Metrics().snapshot()
    llm = begin(VIEW_OF_400, **options)
    found = drive(llm, script.prompts, wanted()).outputs
    check_runner("v2")
    caches = [own_engine().layers[name].kv_cache for name in own_engine().own_layers]
    assert {cache.dtype for cache in caches} == {torch.uint8}
    assert own_engine().num_replays > 0
    check_confirmed(before, 0.25)
    del llm
    release_engines()
    errors = plain.errors([(int(i), output) for i, output in found.items()])
    print(f"SmolLM2, {guesses}, float8 cache: errors against float32, beside vLLM's: {errors}")
    assert len(errors.got) > 100
    assert errors.ratio < 1.25


# ---- every write, and tokens that are drawn ----

CROWD, SAMPLES = 32, 768  # requests at once, and in all
FILTERS = {"top_k": 20, "top_p": 0.9}
# "Perhaps I don": the next token is all but certain, those behind it may be many.
DRAWN_LENGTH = 914
CODE_LENGTH, BOOK_LENGTH = 4000, 4500  # characters


def texts() -> list[str]:
    """Code, a book that goes on, a question about its beginning, a short question."""
    book = BOOK.read_text()
    asked = (
        f"{book[:BOOK_LENGTH]}\n\nContinue.",
        ASKED.format(book[9000 : 9000 + BOOK_LENGTH]),
        "What is the capital of France?",
    )
    return [CODE.read_text()[:CODE_LENGTH], *(TURN.format(text) for text in asked)]


def opening(llm: Any) -> list[int]:
    """The beginning of the book, longer than the view."""
    return llm.get_tokenizer()(BOOK.read_text()[:8000]).input_ids[:DRAWN_LENGTH]


@pytest.fixture(scope="module")
def half() -> Said:
    """In float16."""
    llm = stock_smollm2("float16", max_num_seqs=CROWD)
    outputs = drive(llm, texts(), wanted()).outputs
    crowd = {"crowd": CROWD, "samples": SAMPLES}
    drawn = draw(llm, 1 + SAMPLES, opening(llm), **crowd)
    filtered = draw(llm, 1 + SAMPLES, opening(llm), **crowd, **FILTERS)
    del llm
    release_engines()
    return Said(outputs, drawn, filtered)


@both_guesses
def test_tokens_are_plain_vllms_in_its_default_mode(
    half: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guesses: str
) -> None:
    """Compiled, full and piecewise graphs, against plain vLLM's full graphs."""
    options = drafting(guesses, tmp_path, monkeypatch, "float16")
    options |= ROOM | MODES["default"] | {"kv_cache_memory_bytes": 256 << 20}
    before = Metrics().snapshot()
    llm = begin(VIEW_OF_400, **options)
    found = drive(llm, texts(), wanted(), arrivals=[0, 0, 0, 2])
    check_runner("v2")
    assert own_engine().num_replays > 0
    close = compare_runs((half.greedy[name], found.outputs[name]) for name in half.greedy)
    print(f"SmolLM2, {guesses}, default mode: {close}")
    check_confirmed(before, 0.25)
    close.check(mean=0.005, most=0.1, share=0.5)


@both_guesses
def test_every_write_keeps_the_contract(
    half: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guesses: str
) -> None:
    """Eager: nothing but accepted tokens reaches the cache, and tokens are plain vLLM's up to where
    two were all but equally likely. Every byte of the cache is read in every step, so it is small.
    """
    options = drafting(guesses, tmp_path, monkeypatch, "float16")
    options |= ROOM | EAGER | {"kv_cache_memory_bytes": 64 << 20}
    before = Metrics().snapshot()
    llm = begin(VIEW_OF_400 | {"check_contract": True}, **options)
    found = drive(llm, texts()[:2], wanted(), arrivals=[0, 2])
    check_runner("v2")
    assert own_engine().checker is not None
    assert own_engine().violations == []
    assert own_engine().num_replays == 0
    close = compare_runs((half.greedy[name], output) for name, output in found.outputs.items())
    print(f"SmolLM2, {guesses}, eager: {close}")
    check_confirmed(before, 0.25)
    close.check(mean=0.005, most=0.1, share=0.5)


@both_modes
@both_guesses
def test_drafting_changes_no_byte_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guesses: str, mode: str
) -> None:
    """The target's caches before and after every proposal are equal bit by bit."""
    options = drafting(guesses, tmp_path, monkeypatch, "float16")
    options |= ROOM | MODES[mode] | {"kv_cache_memory_bytes": 256 << 20}
    llm = begin(VIEW_OF_400 | {"specpv_max_requests": 4}, **options)
    read = passages(llm.get_tokenizer()).prompts
    long = [prompt for prompt in read if len(prompt) > 400]  # all of them have views
    check_proposals(llm, long, monkeypatch, least=0.2)


@both_guesses
def test_drawn_tokens_keep_the_distribution(
    half: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guesses: str
) -> None:
    """Full graphs. A full step gives the first token, drafts are judged behind it."""
    options = drafting(guesses, tmp_path, monkeypatch, "float16") | ROOM | GRAPHS
    options["speculation"]["draft_sample_method"] = "probabilistic"
    nwor = VIEW_OF_400 | {"specpv_max_requests": CROWD}
    before = Metrics().snapshot()
    llm = begin(nwor, max_num_seqs=CROWD, **options)
    ours = draw(llm, 1, opening(llm), crowd=CROWD, samples=SAMPLES)
    check_runner("v2")
    assert own_engine().num_replays > 0
    check_confirmed(before, 0.1)
    check_drawn(ours, half.drawn, [slice(i, i + 1) for i in (1, 2, 3)], degrees=10)


@both_guesses
def test_drafts_are_drawn_by_default_as_requests_ask(
    half: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guesses: str
) -> None:
    """Full graphs, with top-k and top-p: no setting says how to draft."""
    options = drafting(guesses, tmp_path, monkeypatch, "float16") | ROOM | GRAPHS
    before = Metrics().snapshot()
    nwor = VIEW_OF_400 | {"specpv_max_requests": CROWD}
    llm = begin(nwor, max_num_seqs=CROWD, **options)
    ours = draw(llm, 1, opening(llm), crowd=CROWD, samples=SAMPLES, **FILTERS)
    assert own_engine().settings.specpv_draft_sampling == "auto"
    assert own_engine().runner.speculator.draws
    assert own_engine().num_replays > 0
    check_confirmed(before, 0.1)
    check_drawn(ours, half.filtered, [slice(i, i + 1) for i in (1, 2, 3)], degrees=8)
    params = [wanted(temperature=1.0, seed=i, logprobs=20, **FILTERS) for i in range(8)]
    found = drive(llm, [opening(llm)] * 8, params).outputs
    check_filtered(found.values(), **FILTERS)
