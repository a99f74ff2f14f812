"""Two real ranks on the CPU: each has half of the heads, both commit alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_process import run_job
from engines import STAGED, STOCK, drive, greedy, start, story_prompts


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
