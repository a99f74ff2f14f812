"""Two real ranks on the CPU: each has half of the heads, both commit alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nwor_specpv.vllm.specpv.rules import DRAFTER
from support.engine_process import run_job
from support.engines import STAGED, STOCK, drive, greedy, start, story_prompts

OTHER_FAILED = "OtherRankError: another rank has failed; its log says why"


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
def test_after_ranks_disagreed_requests_are_computed_again(tmp_path: Path) -> None:
    """One rank's commits are told of a row too few: no rank commits or writes rows of its own."""
    prompts = story_prompts(6)
    expected = drive(start(STOCK), prompts, greedy())
    nwor = {"agreement_group": "tp", "check_contract": True}
    result = run_job(
        tmp_path,
        {
            "start": {"nwor": nwor, "tensor_parallel_size": 2},
            "commits": ("disagree", [2, 3, 9]),
            "prompts": prompts,
            "max_tokens": 80,
        },
        VLLM_LOGGING_LEVEL="WARNING",
    )
    assert result["tokens"] == [expected.tokens[str(i)] for i in range(6)]
    log = result["log"]
    assert "nwor_specpv bypass (rank_disagreement)" in log
    assert "tensor-parallel ranks accepted different tokens" in log
    assert "accepted rows are written one by one" not in log
    for rank in result["ranks"]:
        assert rank["violations"] == []
        assert rank["stats"]["fallbacks"] == {"rank_disagreement": 3, "commit_lost": 3}
        assert rank["counted"]["nwor_recoveries_total"] == 3
        assert rank["counted"]["nwor_commit_failures_total"]["rank_disagreement"] == 3


@pytest.mark.slow
def test_a_fault_that_one_rank_has_alone_ends_the_engine(tmp_path: Path) -> None:
    """vLLM hears of errors of the first rank only, so the other one's process ends."""
    job = {
        "start": {"nwor": {"agreement_group": "tp"}, "tensor_parallel_size": 2},
        "commits": ("alone", [2]),
        "prompts": story_prompts(3),
        "max_tokens": 40,
    }
    with pytest.raises(AssertionError) as raised:
        run_job(tmp_path, job)
    log = str(raised.value)
    assert "rank 1 ends, since the other ranks do not know it: restart the server" in log


def long_prompts() -> list[list[int]]:
    return [(prompt * 40)[:200] for prompt in story_prompts(3)]


@pytest.fixture(scope="module")
def plain_tokens() -> list[list[int]]:
    """What vLLM alone says to the long prompts."""
    story = drive(start(STOCK, speculation=None), long_prompts(), greedy(40))
    return [story.tokens[str(i)] for i in range(3)]


def draft_over_views(folder: Path, passes: int, **more: Any) -> dict[str, Any]:
    """Two ranks, and what each of them counted."""
    speculation = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 8}
    view = {"enable_specpv": True, "specpv_n_sink_blocks": 1, "specpv_n_retrieval_blocks": 3}
    view |= {"specpv_n_window_blocks": 2, "strict": True}
    nwor = STAGED | view | {"specpv_draft_passes": passes}
    start_with = {"nwor": nwor, "speculation": speculation, "tensor_parallel_size": 2}
    job = {"start": start_with, "prompts": long_prompts(), "max_tokens": 40} | more
    return run_job(folder, job, VLLM_LOGGING_LEVEL="WARNING")


@pytest.mark.slow
def test_two_ranks_draft_over_views_alike(tmp_path: Path, plain_tokens: list) -> None:
    """Each rank has summaries, tails and views of its own heads; passes by rank 0's costs."""
    for passes in (0, 3):
        result = draft_over_views(tmp_path, passes)
        assert result["tokens"] == plain_tokens
        assert [rank["violations"] for rank in result["ranks"]] == [[], []]
        first, second = (rank["stats"] for rank in result["ranks"])
        assert first == second
        assert first["committed_tokens"] > 0
        for rank in result["ranks"]:
            assert rank["counted"]["specpv_draft_failures_total"] == {}


def check_both(result: dict[str, Any], broken: int) -> None:
    """Ranks counted and proposed the same, each told its own side of the failure."""
    first, second = result["ranks"]
    assert first["violations"] == second["violations"] == []
    assert first["stats"] == second["stats"]
    assert first["stats"]["committed_tokens"] > 0
    assert first["proposed"] == second["proposed"]
    assert any(map(any, first["proposed"]))
    for name in ("draft_passes", "drafted_tokens"):
        counts = [rank["counted"][f"specpv_{name}_total"] for rank in (first, second)]
        assert counts[0] == counts[1]
    latest = [result["ranks"][rank]["latest_failure"] for rank in (broken, 1 - broken)]
    assert latest == [f"{latest[0].split(':')[0]}: injected", OTHER_FAILED]
    assert all(text in result["log"] for text in latest)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "every"),
    [
        ("layer", 7),  # in the midst of passes, those that choose blocks and later ones
        ("begin", 2),
        ("learn", 5),
    ],
)
def test_what_fails_on_one_rank_drafts_nothing_on_both(
    tmp_path: Path, plain_tokens: list, part: str, every: int
) -> None:
    """Tokens stay right and later proposals have drafts again."""
    result = draft_over_views(tmp_path, 3, broken=(1, part, every, every))
    assert result["tokens"] == plain_tokens
    check_both(result, broken=1)
    failed = [rank["counted"]["specpv_draft_failures_total"] for rank in result["ranks"]]
    assert failed[0] == failed[1] == {"error": failed[0]["error"]}
    assert failed[0]["error"] > 1
    assert result["ranks"][0]["counted"]["specpv_drafted_tokens_total"] > 0


@pytest.mark.slow
def test_passes_that_fail_on_one_rank_while_they_are_timed(
    tmp_path: Path, plain_tokens: list
) -> None:
    """At start: no rank has views then."""
    result = draft_over_views(tmp_path, 0, broken=(0, "layer", 4, 10**6), start_again=True)
    assert result["tokens"] == plain_tokens
    check_both(result, broken=0)
    for rank in result["ranks"]:
        assert rank["counted"]["specpv_draft_failures_total"] == {"start": 1}
        assert rank["counted"]["specpv_draft_passes_total"] == 0


@pytest.mark.slow
def test_without_memory_for_views_on_one_rank_no_rank_has_them(
    tmp_path: Path, plain_tokens: list
) -> None:
    result = draft_over_views(tmp_path, 3, broken=(1, "memory", 1, 1), start_again=True)
    assert result["tokens"] == plain_tokens
    check_both(result, broken=1)  # they have proposed lookups
    first, second = result["ranks"]
    assert first["counted"]["specpv_draft_failures_total"] == {"error": 1}
    assert second["counted"]["specpv_draft_failures_total"] == {"out_of_memory": 1}
    assert first["counted"]["specpv_draft_passes_total"] == 0
    assert "so requests draft by lookups alone" in result["log"]
