"""Draft trees in the real vLLM on a GPU: SmolLM2 with the shipped head, in graphs and without.

What plain vLLM gives on model runner V2 is computed once; `compare_runs.py` says what may differ
where numbers are rounded otherwise. float16 rounds eight times finer than bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nwor_specpv import Metrics
from nwor_specpv.models import smollm2
from nwor_specpv.vllm.tree.shape import ARM_ROWS, shape_of
from support.compare_runs import compare_runs
from support.disturbances import MAX_TOKENS, Script, passages, wanted
from support.engines import drive, greedy, own_engine, release_engines
from support.engines import stats as own_stats
from support.gpu_checks import alike, check_drawn, draw
from support.gpu_engines import (
    EAGER,
    GRAPHS,
    PLAIN,
    STOCK,
    TURN,
    begin,
    choose_runner,
    smollm2_head,
)
from support.metric_counts import grown
from support.processes.runner_v2 import take_turns

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.serves("draft trees", "V2"),
]

MODEL = {
    "model": str(smollm2("bfloat16")) if torch.cuda.is_available() else "",
    "dtype": "float16",
    "kv_cache_memory_bytes": 1 << 30,
    "max_model_len": 2048,
    "max_num_batched_tokens": 8192,
}
SIZES = (8, 16, 32)
SMALL = (1, 3, 4)  # prompts of 200, 750 and 50 tokens
CROWD, SAMPLES = 32, 768  # requests at once, and in all
DRAWN_LENGTH = 914


@dataclass
class Stock:
    """What plain vLLM says."""

    script: Script
    greedy: dict[str, Any]
    sampled: dict[str, list[int]]
    drawn: list[list[int]]


def sampled() -> Any:
    return greedy(MAX_TOKENS, temperature=0.8, top_p=0.9, seed=7)


@pytest.fixture(scope="module")
def stock() -> Stock:
    with pytest.MonkeyPatch.context() as patch:
        choose_runner(patch, "v2")
        llm = begin(PLAIN, **(MODEL | STOCK | GRAPHS | {"max_num_seqs": CROWD}))
        script = passages(llm.get_tokenizer())
        found = Stock(
            script,
            drive(llm, script.prompts, wanted()).outputs,
            drive(llm, script.prompts, sampled()).tokens,
            draw(llm, 1 + SAMPLES, opening(script), crowd=CROWD, samples=SAMPLES),
        )
        del llm
        release_engines()
        return found


def opening(script: Script) -> list[int]:
    return (script.prompts[0] + script.prompts[1])[:DRAWN_LENGTH]


def trees(folder: Path, rows: int | str, nwor: dict[str, Any], **options: Any) -> Any:
    speculation = smollm2_head(folder)
    del speculation["num_speculative_tokens"]
    settings = {"strict": True, "draft_tree": rows} | nwor
    return begin(settings, **(MODEL | {"speculation": speculation} | options))


def check(before: dict[str, Any], *, graphs: bool) -> None:
    engine = own_engine()
    assert type(engine.runner.speculator).__name__ == "TreeSpeculator"
    assert engine.violations == []
    assert own_stats()["fallbacks"] == {}
    assert (engine.num_replays > 0) is graphs
    assert bool(engine.runner.speculator._graphs) is graphs
    staged, committed = (grown(before, f"nwor_{k}_tokens_total") for k in ("staged", "committed"))
    print(f"{committed} of {staged} drafts were committed, {engine.num_replays} steps replayed")
    assert committed > 0


@pytest.mark.parametrize("graphs", [False, True], ids=["eager, checked", "graphs"])
@pytest.mark.parametrize("rows", SIZES)
def test_tokens_are_plain_vllms(
    stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, graphs: bool
) -> None:
    """Greedy, up to where two tokens were all but equally likely. A checker reads every byte of the
    cache in every step, so it has a small one and few prompts."""
    choose_runner(monkeypatch, "v2")
    before = Metrics().snapshot()
    options = GRAPHS if graphs else EAGER | {"kv_cache_memory_bytes": 56 << 20}
    llm = trees(tmp_path, rows, {} if graphs else {"check_contract": True}, **options)
    names = [str(i) for i, _ in enumerate(stock.script.prompts) if graphs or i in SMALL]
    prompts = [stock.script.prompts[int(name)] for name in names]
    outputs = drive(llm, prompts, wanted(), arrivals=[0, 0, 0, 2, 5, 9][: len(names)]).outputs
    close = compare_runs((stock.greedy[name], outputs[str(i)]) for i, name in enumerate(names))
    print(f"{rows} rows: {close}")
    check(before, graphs=graphs)
    close.check(mean=0.005, most=0.1, share=0.5)
    if not graphs:
        return
    share = alike(drive(llm, prompts, sampled()).tokens, stock.sampled)
    print(f"seeded: like plain vLLM before a difference: {share:.2f}")
    assert share > 0.3  # the noise is plain vLLM's, the logits differ by rounding


def test_what_happens_to_requests(
    stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full graphs: preempted, found in the prefix cache, aborted, stopped."""
    choose_runner(monkeypatch, "v2")
    before = Metrics().snapshot()
    llm = trees(tmp_path, 16, {}, **(GRAPHS | stock.script.options))
    found = stock.script.run(llm)
    check(before, graphs=True)
    close = compare_runs((stock.greedy[str(i)], output) for i, output in found.outputs)
    print(f"{found.preemptions} preemptions, {found.cut} cut, {found.stops} stops; {close}")
    close.check(mean=0.005, most=0.1, share=0.5)


def test_drawn_tokens_have_plain_vllms_distribution(
    stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_runner(monkeypatch, "v2")
    before = Metrics().snapshot()
    llm = trees(tmp_path, 16, {}, **(GRAPHS | {"max_num_seqs": CROWD}))
    ours = draw(llm, 1, opening(stock.script), crowd=CROWD, samples=SAMPLES)
    check(before, graphs=True)
    check_drawn(ours, stock.drawn, [slice(0, 2), slice(1, 3)], degrees=3)


def test_steps_take_turns_in_their_rows(
    stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto`, with another number of rows in every step: each has graphs of its own."""
    choose_runner(monkeypatch, "v2")
    before = Metrics().snapshot()
    llm = trees(tmp_path, "auto", {}, **GRAPHS)
    take_turns(llm, [[0, 0], *([rows - 1, 0] for rows in ARM_ROWS)])
    outputs = drive(llm, stock.script.prompts, wanted()).outputs
    close = compare_runs((stock.greedy[name], output) for name, output in outputs.items())
    print(close)
    check(before, graphs=True)
    close.check(mean=0.005, most=0.1, share=0.5)
    lengths = {rows for rows, _ in own_engine().runner.speculator._graphs}
    assert lengths == set(ARM_ROWS)
    for kind in ("plain", "guess"):
        assert grown(before, f"specpv_{kind}_steps_total") > 3


ANSWER, TEXTS = 96, 16
# Of tokens per step: rounding parts texts, and SmolLM2 runs here in float16.
TOLERANCE = 0.1


@pytest.mark.parametrize("rows", SIZES)
def test_as_many_tokens_per_step_as_the_head_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Against `train.acceptance`, which walks the same trees over texts that are known, in float32.
    It would see a wrong hidden state, mask or position, which tokens do not show."""
    choose_runner(monkeypatch, "v2")
    texts, expected = held_out(rows)
    llm = trees(tmp_path, rows, {}, **(GRAPHS | {"max_num_seqs": TEXTS}))
    story = drive(llm, texts, greedy(ANSWER, ignore_eos=False, stop_token_ids=[0, 2]))
    steps = sum(len(lengths) - 1 for lengths in story.lengths.values())
    tokens = sum(lengths[-1] - lengths[0] for lengths in story.lengths.values())
    print(f"{rows} rows: {tokens / steps:.3f} tokens a step, expected {expected:.3f}")
    assert tokens / steps == pytest.approx(expected, rel=TOLERANCE)


def held_out(rows: int) -> tuple[list[list[int]], float]:
    """Held-out questions, and tokens per step of trees of so many rows over the greedy answers."""
    from nwor_specpv.drafters import TreeConfig
    from nwor_specpv.drafters.eagle3 import SHIPPED, Eagle3Drafter
    from nwor_specpv.drafters.eagle3_head import Eagle3Head
    from nwor_specpv.train import acceptance, prompts
    from nwor_specpv.train.prompt_file import prompt_encoder
    from nwor_specpv.train.target import TrainingTarget

    folder, head = smollm2("float32"), Eagle3Head.load(SHIPPED)
    target = TrainingTarget(folder, head.shape.feature_layers)
    chosen = [one for one in prompts.held_out(prompt_encoder(folder)) if one.kind == "chat"]
    chosen = chosen[:TEXTS]
    longest = max(len(one.tokens) + one.invented[1] + len(one.answer) + 1 for one in chosen)
    corpus = acceptance.write_texts(target, chosen, ANSWER, longest + ANSWER)
    shape = shape_of(rows)
    tree = TreeConfig(rows=shape.rows, depth=shape.depth, top_k=shape.width)
    every = {"draft_vocabulary": len(head.draft_to_target), "min_probability": 0.0}
    drafter = Eagle3Drafter(head, target.embedding, target.output, **every)
    tallies = []
    for row in range(len(chosen)):
        tallies.append(acceptance.Tally(ANSWER))
        acceptance.walk(drafter, corpus, row, tree, target.hidden, tallies[-1])
    return [one.tokens for one in chosen], acceptance.report(tallies)["tokens"]


def test_measured_speed_decides_for_a_crowd(
    stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the largest trees a full batch would have more rows than a step ever has."""
    choose_runner(monkeypatch, "v2")
    llm = trees(tmp_path, "auto", {}, **(GRAPHS | {"max_num_seqs": CROWD}))
    prompts = stock.script.prompts
    outputs = drive(llm, prompts * (CROWD // len(prompts)), wanted()).outputs
    pairs = ((stock.greedy[str(int(n) % len(prompts))], output) for n, output in outputs.items())
    close = compare_runs(pairs)
    print(close)
    assert own_stats()["fallbacks"] == {}
    close.check(mean=0.005, most=0.1, share=0.5)


def test_a_prompt_of_the_chat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the documentation starts it: the switch and a head, nothing else."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    llm = trees(tmp_path, "auto", {})
    text = TURN.format("Name ten animals.")
    (output,) = llm.generate([text], greedy(64), use_tqdm=False)
    assert len(output.outputs[0].token_ids) > 16
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert type(scheduler).__name__ == "TreeScheduler"
