"""Ranks with caches on a GPU: one by itself over gloo and NCCL, two over gloo on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nwor_specpv import RoundPlan
from tests.python.kv_interceptor import test_agreement as on_cpu

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def commit_without_waiting(rank: int) -> dict[str, Any]:
    """The second round only enqueues: torch raises where the host would wait for the device."""
    me = on_cpu.Rank(rank)
    me.begin()
    first = me.commit(2).ok
    path = torch.tensor([[1, 2, 3]], dtype=torch.int32, device="cuda")
    counts = torch.tensor([3], dtype=torch.int32, device="cuda")
    slots = torch.tensor([4, 5, 6, 7], device="cuda")
    rows = torch.ones(4, on_cpu.HEADS, on_cpu.DIM, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        me.interceptor.begin(RoundPlan([4], [3]))
        for layer in range(2):
            me.interceptor.write(f"layer{layer}", rows, rows, slots)
        receipt = me.interceptor.commit(path, counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"first": first, "second": receipt.ok, "tokens": receipt.committed_tokens}


ALONE = (on_cpu.commit_alike,)
WORK = (
    on_cpu.commit_alike,
    on_cpu.accept_other_counts,
    on_cpu.accept_other_slots,
    on_cpu.lack_a_layer_on_one_rank,
    on_cpu.disagree_and_agree_again,
    on_cpu.write_directly_on_one_rank,
    on_cpu.write_directly_everywhere,
    on_cpu.pass_a_wrong_shape_on_one_rank,
    on_cpu.pass_a_wrong_view_on_one_rank,
    on_cpu.have_no_round_on_one_rank,
)
# The receipt says it late, and the device counts it.
REFUSED = on_cpu.REFUSED | {"degraded": "none", "counted": {}}


@pytest.mark.parametrize(
    ("backend", "work"),
    [("gloo", ALONE), ("nccl", (*ALONE, commit_without_waiting))],
    ids=["gloo", "nccl"],
)
def test_a_rank_by_itself_commits(tmp_path: Path, backend: str, work: tuple) -> None:
    if backend == "nccl" and not dist.is_nccl_available():
        pytest.skip("torch was built without NCCL")
    (seen,) = on_cpu.run_ranks(tmp_path, 1, work, "cuda", backend)
    assert seen["commit_alike"] == {"ok": True, "tokens": 2, "changed": [[5, 6]] * 4}
    if backend == "nccl":
        assert seen["commit_without_waiting"] == {"first": True, "second": True, "tokens": 3}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, by the name of the work."""
    return on_cpu.run_ranks(tmp_path_factory.mktemp("ranks"), 2, WORK, "cuda")


def test_ranks_that_accept_alike_commit(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["commit_alike"] == {"ok": True, "tokens": 2, "changed": [[5, 6]] * 4}


@pytest.mark.parametrize("work", ["accept_other_counts", "accept_other_slots"])
def test_ranks_that_differ_write_nothing(ranks: list[dict[str, Any]], work: str) -> None:
    for seen in ranks:
        assert seen[work] == REFUSED


def test_a_rank_that_cannot_commit_stops_the_others(ranks: list[dict[str, Any]]) -> None:
    good, bad = (seen["lack_a_layer_on_one_rank"] for seen in ranks)
    assert good == REFUSED
    assert bad["error"] == bad["degraded"] == "incomplete_staging"
    assert bad["unchanged"]
    assert (bad["ok"], bad["tokens"]) == (False, 0)


def test_a_disagreement_is_over_with_its_round(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["disagree_and_agree_again"] == {"first": False, "second": True}


def test_a_rank_that_wrote_directly_commits_no_more_than_the_others(
    ranks: list[dict[str, Any]],
) -> None:
    for rank, seen in enumerate(ranks):
        counted = {"capacity": 1} if rank == 1 else {}
        expected = REFUSED | {"counted": counted, "open": False}
        assert seen["write_directly_on_one_rank"] == expected


def test_ranks_that_all_wrote_directly_agree(ranks: list[dict[str, Any]]) -> None:
    for seen in ranks:
        assert seen["write_directly_everywhere"] == {"ok": True, "degraded": "none", "tokens": 0}


@pytest.mark.parametrize(
    "work",
    [
        "pass_a_wrong_shape_on_one_rank",
        "pass_a_wrong_view_on_one_rank",
        "have_no_round_on_one_rank",
    ],
)
def test_a_rank_whose_commit_throws_refuses_for_all(ranks: list[dict[str, Any]], work: str) -> None:
    good, bad = (seen[work] for seen in ranks)
    assert bad == {"unchanged": True, "then": True}
    assert good == REFUSED | {"then": True}
