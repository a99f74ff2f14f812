"""Two real ranks on the CPU: each has half of the heads, both commit alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_process import run_job
from engines import STAGED, STOCK, drive, greedy, start, story_prompts

from nwor_specpv.vllm.specpv.rules import DRAFTER


@pytest.mark.slow
def test_two_ranks_commit_alike(tmp_path: Path) -> None:
    prompts = story_prompts(6)
    expected = drive(start(STOCK), prompts, greedy())
    job = {
        "start": {"nwor": STAGED | {"agreement_group": "tp"}, "tensor_parallel_size": 2},
        "prompts": prompts,
        "max_tokens": 80,
    }
    result = run_job(tmp_path, job)
    assert result["tokens"] == [expected.tokens[str(i)] for i in range(6)]
    first, second = (rank["stats"] for rank in result["ranks"])
    assert first["staged_tokens"] == first["committed_tokens"] + first["rejected_tokens"] > 0
    assert first["committed_tokens"] > 0
    assert first == second
    assert first["fallbacks"] == {}
    assert [rank["violations"] for rank in result["ranks"]] == [[], []]


@pytest.mark.slow
def test_ranks_that_disagree_write_row_by_row(tmp_path: Path) -> None:
    """One rank's commit is told of a row too few: no rank commits, and tokens stay right."""
    prompts = story_prompts(3)
    expected = drive(start(STOCK), prompts, greedy(40))
    nwor = {"agreement_group": "tp", "check_contract": True}
    job = {"start": {"nwor": nwor, "tensor_parallel_size": 2}, "disagree": True}
    result = run_job(tmp_path, job | {"prompts": prompts, "max_tokens": 40})
    assert result["tokens"] == [expected.tokens[str(i)] for i in range(3)]
    for rank in result["ranks"]:
        assert rank["stats"]["fallbacks"] == {"rank_disagreement": 1, "commit_failure": 1}
        assert rank["violations"] == []
    assert "accepted rows are written one by one" in result["log"]


@pytest.mark.slow
def test_two_ranks_draft_over_views_alike(tmp_path: Path) -> None:
    """Each rank has summaries, tails and views of its own heads; passes by rank 0's costs."""
    prompts = [(prompt * 40)[:200] for prompt in story_prompts(3)]
    expected = drive(start(STOCK, speculation=None), prompts, greedy(40))
    speculation = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 8}
    view = {"enable_specpv": True, "specpv_n_sink_blocks": 1, "specpv_n_retrieval_blocks": 3}
    view |= {"specpv_n_window_blocks": 2, "strict": True}
    for passes in (0, 3):
        nwor = STAGED | view | {"specpv_draft_passes": passes}
        start_with = {"nwor": nwor, "speculation": speculation, "tensor_parallel_size": 2}
        job = {"start": start_with, "prompts": prompts, "max_tokens": 40}
        result = run_job(tmp_path, job)
        assert result["tokens"] == [expected.tokens[str(i)] for i in range(3)]
        assert [rank["violations"] for rank in result["ranks"]] == [[], []]
        first, second = (rank["stats"] for rank in result["ranks"])
        assert first == second
        assert first["committed_tokens"] > 0
