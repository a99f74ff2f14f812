"""The shipped story model in the real vLLM: the quick part, run by `make test`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nwor_specpv import Metrics, NworError
from nwor_specpv.models import stories
from support.configs import HYBRID, WINDOW
from support.engines import (
    DIRECT,
    STAGED,
    STOCK,
    caches,
    counted,
    drive,
    greedy,
    own_engine,
    start,
    story_prompts,
)
from support.engines import stats as own_stats
from support.installed import PAGE

pytestmark = pytest.mark.serves("staging", "V1")


def check_books(*, committed: bool = True) -> dict:
    """Nothing was aborted or bypassed, no rule was broken, and staged = committed + rejected."""
    stats = own_stats()
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"]
    assert stats["staged_tokens"] > 0
    assert (stats["committed_tokens"] > 0) is committed
    assert stats["rejected_tokens"] > 0
    assert stats["fallbacks"] == {}
    assert not stats["round_open"]
    assert own_engine().violations == []
    return stats


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What vLLM itself makes of six prompts, with the same speculation."""
    llm = start(STOCK)
    assert own_engine().off == "switched off by enable_nwor"
    assert own_engine().interceptor is None
    story = drive(llm, story_prompts(6), greedy())
    return [story.tokens[str(i)] for i in range(6)]


@pytest.mark.quick
def test_drafts_are_staged_and_tokens_are_vllms(expected: list[list[int]]) -> None:
    before = Metrics().snapshot()
    llm = start(STAGED)
    story = drive(llm, story_prompts(6), greedy())
    assert [story.tokens[str(i)] for i in range(6)] == expected
    stats = check_books()
    engine = 'nwor_engine_info{drafter="ngram",draft_tokens="4",mode="full",attention="auto"} 1\n'
    assert engine in Metrics().render()
    # vLLM counts the same drafts, except those of a request's last step, which it cuts short.
    assert counted(llm, "vllm:spec_decode_num_draft_tokens") == stats["staged_tokens"]
    assert counted(llm, "vllm:spec_decode_num_accepted_tokens") <= stats["committed_tokens"]
    name = "nwor_contract_violations_total"
    assert Metrics().snapshot()[name] == before[name]


def test_requests_that_arrive_late_share_prefixes_and_chunks(expected: list[list[int]]) -> None:
    """Prompts and half of their answers again: blocks of both are in the prefix cache; chunks of
    24."""
    llm = start(STAGED, max_num_batched_tokens=48, long_prefill_token_threshold=24)
    prompts = story_prompts(6)
    first = drive(llm, prompts, greedy(), arrivals=[0, 1, 3, 3, 7, 20])
    assert [first.tokens[str(i)] for i in range(6)] == expected
    hits = counted(llm, "vllm:prefix_cache_hits")
    longer = [prompt + answer[:40] for prompt, answer in zip(prompts, expected, strict=True)]
    second = drive(llm, longer, greedy(40), arrivals=[0, 0, 0, 2, 2, 2])
    assert [second.tokens[str(i)] for i in range(6)] == [answer[40:] for answer in expected]
    assert counted(llm, "vllm:prefix_cache_hits") > hits
    check_books()


def test_preempted_requests_resume_as_if_nothing_had_happened(expected: list[list[int]]) -> None:
    llm = start(STAGED, num_gpu_blocks_override=320 // PAGE, max_model_len=256)
    story = drive(llm, story_prompts(6), greedy())
    assert counted(llm, "vllm:num_preemptions") > 0
    assert [story.tokens[str(i)] for i in range(6)] == expected
    check_books()


def test_aborted_requests_leave_the_others_alone(expected: list[list[int]]) -> None:
    llm = start(STAGED)
    story = drive(llm, story_prompts(6), greedy(), aborts={5: "1", 9: "4"})
    for request in (0, 2, 3, 5):
        assert story.tokens[str(request)] == expected[request]
    for request in (1, 4):
        got = story.tokens[str(request)]
        assert len(got) < 80
        assert got == expected[request][: len(got)]
    check_books()


@pytest.mark.quick
def test_only_drafts_are_staged(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """In every round: rows of a prompt and each request's row 0 go to the cache at once."""
    from nwor_specpv.vllm.steps import Steps

    begin, mixed = Steps.begin, []

    def look(
        self: Steps, group: int, lens: list, drafts: list, *rest: object, **more: object
    ) -> None:
        begin(self, group, lens, drafts, *rest, **more)
        staged = [row >= 0 for row in own_engine().interceptor.stage_rows()]
        wanted = [
            row >= count - number
            for count, number in zip(lens, drafts, strict=True)
            for row in range(count)
        ]
        assert staged == wanted
        prompts = [c > 1 and n == 0 for c, n in zip(lens, drafts, strict=True)]
        mixed.append(any(drafts) and any(prompts))

    monkeypatch.setattr(Steps, "begin", look)
    llm = start(STAGED, max_num_batched_tokens=24)
    story = drive(llm, story_prompts(6), greedy(30), arrivals=[0, 1, 3, 3, 7, 12])
    assert [story.tokens[str(i)] for i in range(6)] == [tokens[:30] for tokens in expected]
    assert any(mixed), "no step had drafts and a prompt"
    check_books()


def test_a_draft_model_is_never_staged(expected: list[list[int]]) -> None:
    """The model drafts for itself, so nearly all is accepted; its own layers are vLLM's."""
    speculation = {"method": "draft_model", "model": str(stories()), "num_speculative_tokens": 3}
    llm = start(STAGED, speculation=speculation)
    story = drive(llm, story_prompts(6), greedy())
    assert [story.tokens[str(i)] for i in range(6)] == expected
    engine = own_engine()
    ours = {name for name, layer in engine.layers.items() if "Nwor" in type(layer.impl).__name__}
    assert ours == set(engine.own_layers)
    assert ours
    assert not any("draft" in name for name in ours)
    assert any("draft" in name for name in engine.layers)
    stats = own_stats()
    assert stats["committed_tokens"] > 2 * stats["rejected_tokens"]
    assert engine.violations == []


def test_the_cache_holds_what_direct_writes_put_there_and_no_rejected_row() -> None:
    """The same run twice, staged and written directly: the caches differ in rejected rows only.

    It stops while all requests are at work: no block has been used twice.
    """
    runs = {}
    for name, nwor in (("direct", DIRECT), ("staged", STAGED)):
        story = drive(start(nwor), story_prompts(6), greedy(200), max_steps=60)
        assert not story.finished
        runs[name] = (story.tokens, caches(), own_stats())
    (direct_tokens, direct, direct_stats), (tokens, staged, stats) = runs.values()
    assert tokens == direct_tokens
    assert direct_stats["fallbacks"]["capacity"] > 0
    assert direct_stats["staged_tokens"] == 0
    assert stats["rejected_tokens"] > 0
    left_out = set()
    for name, cache in staged.items():
        wrote = cache.transpose(1, 2).flatten(0, 1)  # [slots, heads, K and V]
        theirs = direct[name].transpose(1, 2).flatten(0, 1)
        empty = (wrote == 0).all(dim=(1, 2))
        assert torch.equal(wrote[~empty], theirs[~empty])
        rejected = empty & (theirs != 0).any(dim=(1, 2))
        left_out.add(tuple(rejected.nonzero().flatten().tolist()))
    # The same slots in every layer: rejected, and not yet reached by a later token.
    (slots,) = left_out
    assert 0 < len(slots) <= stats["rejected_tokens"]


@pytest.mark.parametrize(
    ("config", "groups"),
    [(HYBRID, 2), pytest.param(WINDOW, 1, marks=pytest.mark.slow)],
    ids=["hybrid", "window"],
)
def test_each_cache_group_has_its_staging(tmp_path: Path, config: dict, groups: int) -> None:
    """Random weights: sliding windows, softcaps, and layers of two groups that share memory."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = []
    for nwor in (STOCK, STAGED):
        model = {"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True}
        found.append(drive(start(nwor, **model), story_prompts(6), greedy(60)).tokens)
    assert found[0] == found[1]
    stats = check_books()
    assert stats["groups"] == groups
    assert (own_engine().checker is None) is (groups > 1)


@pytest.mark.slow
def test_logprobs_are_vllms() -> None:
    """Of the tokens emitted, and of the next best; float32, another order of summation."""
    found = []
    for nwor in (STOCK, STAGED):
        prompts = [{"prompt_token_ids": p} for p in story_prompts(3)]
        outputs = start(nwor).generate(prompts, greedy(40, logprobs=3), use_tqdm=False)
        found.append([step for output in outputs for step in output.outputs[0].logprobs])
    for theirs, ours in zip(*found, strict=True):
        assert ours.keys() == theirs.keys()
        for token, entry in theirs.items():
            assert ours[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
            assert ours[token].rank == entry.rank


def test_rounds_that_do_not_fit_into_staging_are_written_directly(
    expected: list[list[int]],
) -> None:
    """Staging for eight rows: rounds of one or two requests are staged, those of more are not."""
    llm = start({"check_contract": True, "staging_rows": 4, "max_staging_bytes": 9 * 5128})
    story = drive(llm, story_prompts(6), greedy(), arrivals=[0, 20, 40, 40, 40, 40])
    assert [story.tokens[str(i)] for i in range(6)] == expected
    stats = own_stats()
    assert stats["fallbacks"].keys() == {"capacity"}
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"] > 0
    assert stats["committed_tokens"] > 0
    assert own_engine().violations == []


def test_strict_makes_a_bypass_an_error() -> None:
    llm = start({"strict": True, "max_staging_bytes": 1})
    with pytest.raises(NworError, match="than staging may hold"):
        drive(llm, story_prompts(2), greedy())


def test_a_step_that_dies_in_the_model_is_aborted_by_the_next(expected: list[list[int]]) -> None:
    llm = start({"strict": True})
    drive(llm, story_prompts(1), greedy(2))
    engine = own_engine()
    engine.steps.begin(0, [5, 5], [4, 4], torch.arange(10))
    story = drive(llm, story_prompts(6), greedy())
    assert [story.tokens[str(i)] for i in range(6)] == expected
    assert engine.interceptor.stats()["aborted_rounds"] == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"nwor_specpv": {"stagin_rows": 3}}, "unknown key 'stagin_rows'.*nearest.*'staging_rows'"),
        ({"nwor_specpv": {"staging_rows": "many"}}, "staging_rows: got 'many'"),
        ({"nwor_spec_pv": {}}, "unknown key 'nwor_spec_pv'; write 'nwor_specpv'"),
    ],
)
def test_wrong_settings_stop_the_start(config: dict, message: str) -> None:
    with pytest.raises(NworError, match=message):
        start({}, additional_config=config)


def test_without_speculation_vllm_is_left_alone() -> None:
    llm = start({"strict": True}, speculation=None)
    drive(llm, story_prompts(1), greedy(4))
    assert own_engine().off == "no speculation is configured"
    assert own_engine().interceptor is None
    assert "Nwor" not in {type(layer.impl).__name__[:4] for layer in own_engine().layers.values()}


def test_the_plugin_registers_more_than_once() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from nwor_specpv.vllm import plugin

    for _ in range(2):
        plugin.register()
    assert AttentionBackendEnum.CPU_ATTN.get_path() == plugin.CPU_BACKEND
    assert AttentionBackendEnum.CUSTOM.get_path() == plugin.CUDA_BACKEND


@pytest.mark.slow
def test_registering_imports_next_to_nothing() -> None:
    """vLLM calls it in every process, which knows its configuration by then; what is replaced in
    others' modules waits until vLLM imports them."""
    program = """
import sys
import vllm.v1.engine.core
from nwor_specpv.vllm import plugin
from nwor_specpv.vllm.hooks import speculators
before = set(sys.modules)
plugin.register()
plugin.register()
new = set(sys.modules) - before
print("imported", sum(not name.startswith("nwor_specpv") for name in new))
import vllm.v1.worker.gpu.spec_decode
print("problem", speculators.problem)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(re.search(r"^imported (\d+)$", done.stdout, re.MULTILINE)[1]) < 12
    assert "problem None" in done.stdout


@pytest.mark.quick
def test_methods_of_the_runners_are_wrapped_once() -> None:
    import vllm.v1.worker.gpu.model_runner as v2
    import vllm.v1.worker.gpu_model_runner as v1

    from nwor_specpv.vllm import versions
    from nwor_specpv.vllm.hooks import prefix_hits
    from nwor_specpv.vllm.hooks import runner as runner_hooks

    for _ in range(2):
        assert runner_hooks.install() is None
        assert runner_hooks.install_plan() is None
        assert prefix_hits.install() is None
    expected = [
        (v1.GPUModelRunner, "_update_states_after_model_execute"),
        (v1.GPUModelRunner, "_update_states"),
        (v1.GPUModelRunner, "_is_uniform_decode"),
        (v2.GPUModelRunner, "postprocess_sampled"),
        (v2.GPUModelRunner, "add_requests"),
        (v2, versions.adapter.uniform_rows_v2.path),
        (v2.GPUModelRunner, "prepare_inputs"),
    ]
    for holder, name in expected:
        wrapped = getattr(holder, name)
        assert getattr(wrapped, "_nwor_specpv_wrapped", False), name
        assert not getattr(wrapped.__wrapped__, "_nwor_specpv_wrapped", False), name
