"""Staging alone on model runner V2, with vLLM's own drafters; `triton_cpu.py` says how it runs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from support.engine_process import run_script
from support.engines import STAGED, STOCK, drive, greedy, start, story_prompts
from support.installed import ADAPTER, PAGE

pytestmark = [pytest.mark.serves("staging", "V2"), pytest.mark.quick]

TOKENS, DRAFTS = 16, 3
SCRIPT = Path(__file__).parents[1] / "support" / "processes" / "staging_v2.py"
DRAFTERS = {"head": {}, "ngram": {"method": "ngram_gpu", "prompt_lookup_max": 3}}
ON_V2 = {"head": True, "ngram": ADAPTER.unsupported_by_v2 is None}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each drafter that model runner V2 has in this vLLM: what plain vLLM gives, and what V2."""
    first = [(text * 40)[: 2 * PAGE + 9] for text in story_prompts(3)]
    plain = start(STOCK, speculation=None)
    expected = drive(plain, first, greedy(TOKENS)).tokens
    # All of it but the last token is in the prefix cache when it comes again.
    texts = [text + expected[str(i)] for i, text in enumerate(first)]
    again = [text[: (2 * PAGE) + 1] for text in texts]
    after = drive(plain, again, greedy(TOKENS)).tokens
    names = [name for name in DRAFTERS if ON_V2[name]]
    jobs = [
        {
            "start": {
                "nwor": STAGED,
                "speculation": DRAFTERS[name] | {"num_speculative_tokens": DRAFTS},
                "enable_prefix_caching": True,
            },
            "prompts": first,
            "again": again,
            "max_tokens": TOKENS,
        }
        for name in names
    ]
    jobs.append(copy.deepcopy(jobs[0]) | {"refuse": [1, 2, 5]})
    jobs[-1]["start"]["nwor"] = {}
    found, log = run_script(tmp_path_factory.mktemp("v2"), jobs, SCRIPT)
    print(log[-2000:])
    return {"expected": [expected, after]} | dict(zip([*names, "refused"], found, strict=True))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_are_staged_and_tokens_are_vllms(runs: dict[str, Any], drafter: str) -> None:
    if not ON_V2[drafter]:
        pytest.skip(f"vLLM {ADAPTER.version} has no n-grams on model runner V2")
    found = runs[drafter]
    assert found["runner"] == "vllm.v1.worker.cpu.model_runner"
    assert found["tokens"] == runs["expected"]
    assert found["violations"] == []
    stats = found["stats"]
    assert stats["fallbacks"] == {}
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"] > 0


def test_refused_commits_are_survived(runs: dict[str, Any]) -> None:
    """Asynchronous scheduling: another step is on its way when a refusal is known."""
    found = runs["refused"]
    assert found["scheduler"] == "AsyncScheduler"
    assert found["tokens"] == runs["expected"]
    # Two may be lost before the scheduler is told.
    assert 1 <= found["recoveries"] <= found["refused"] <= 3


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_rows_that_fill_a_prompts_step_up_are_drafts(runs: dict[str, Any], drafter: str) -> None:
    """vLLM puts drafts behind the last token of a prompt that the prefix cache has, so that steps
    are alike. It rejects all of them: none may be in the cache."""
    if not ON_V2[drafter]:
        pytest.skip(f"vLLM {ADAPTER.version} has no n-grams on model runner V2")
    found = runs[drafter]
    # A head computes the last block of a hit again.
    assert set(found["cached"].values()) == {2 * PAGE if drafter == "ngram" else PAGE}
    told = [step for step in found["steps"] if step[2]]
    if ADAPTER.version == "0.26.0":
        assert told == [], "this version does not say it"
        return
    assert any(any(scheduled) for _, _, scheduled in told)
    if drafter == "ngram":
        prompts = [step for step in told if step[0] == [1 + DRAFTS] * 2 == [1 + n for n in step[2]]]
        assert prompts, "no prompt's step was filled up"
    for _, drafts, scheduled in told:
        assert drafts[: len(scheduled)] == scheduled
