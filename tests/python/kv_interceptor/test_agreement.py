"""Two ranks over gloo on the loopback: they commit alike, or neither writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nwor_specpv import CommitTail, Interceptor, NworConfig, NworError, RoundPlan

PAGES, TOKENS, HEADS, DIM = 4, 4, 2, 8
RANKS = 2


class Rank:
    """One rank's interceptor over its own shard: other K/V, the same rows and slots."""

    device = "cpu"  # of all in a process

    def __init__(self, rank: int, pages: int = PAGES, **config: Any):
        torch.manual_seed(rank)
        shape = (pages, TOKENS, HEADS, DIM)
        self.caches = [torch.randn(shape, device=self.device) for _ in range(4)]
        group = dist.group.WORLD.group_name
        self.interceptor = Interceptor(NworConfig(agreement_group=group, **config))
        for layer in range(2):
            self.interceptor.bind_layer(f"layer{layer}", *self.caches[2 * layer : 2 * layer + 2])

    def begin(self, layers: int = 2) -> None:
        """A root and three drafts, staged in the first `layers` layers."""
        self.interceptor.begin(RoundPlan([4], [3]))
        slots = torch.tensor([4, 5, 6, 7], device=self.device)
        for layer in range(layers):
            rows = [torch.randn(4, HEADS, DIM, device=self.device) for _ in range(2)]
            self.interceptor.write(f"layer{layer}", *rows, slots)

    def commit(self, accepted: int, slots: list[int] | None = None):
        path = torch.tensor([[1, 2, 3]], dtype=torch.int32, device=self.device)
        counts = torch.tensor([accepted], dtype=torch.int32, device=self.device)
        where = None if slots is None else torch.tensor([slots], device=self.device)
        return self.interceptor.commit(path, counts, slots=where)

    def copy(self) -> list[torch.Tensor]:
        return [cache.clone() for cache in self.caches]

    def unchanged(self, copies: list[torch.Tensor]) -> bool:
        return all(map(torch.equal, self.caches, copies))


def commit_alike(rank: int) -> dict[str, Any]:
    me = Rank(rank)
    me.begin()
    copies = me.copy()
    receipt = me.commit(2)
    changed = [
        (now != then).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        for now, then in zip(me.caches, copies, strict=True)
    ]
    return {"ok": receipt.ok, "tokens": receipt.committed_tokens, "changed": changed}


def refusal(me: Rank, receipt, copies: list[torch.Tensor]) -> dict[str, Any]:
    return {
        "ok": receipt.ok,
        "error": receipt.verdict.error,
        "degraded": receipt.degraded,
        "tokens": receipt.committed_tokens,
        "unchanged": me.unchanged(copies),
        "counted": me.interceptor.stats()["fallbacks"],
    }


def accept_other_counts(rank: int) -> dict[str, Any]:
    me = Rank(rank)
    me.begin()
    copies = me.copy()
    return refusal(me, me.commit(1 + rank), copies)


def accept_other_slots(rank: int) -> dict[str, Any]:
    me = Rank(rank)
    me.begin()
    copies = me.copy()
    return refusal(me, me.commit(2, [8, 9 + rank, -1]), copies)


def lack_a_layer_on_one_rank(rank: int) -> dict[str, Any]:
    me = Rank(rank)
    me.begin(layers=2 - rank)
    copies = me.copy()
    return refusal(me, me.commit(2), copies)


def disagree_and_agree_again(rank: int) -> dict[str, Any]:
    me = Rank(rank)
    me.begin()
    first = me.commit(1 + rank).ok
    me.begin()
    return {"first": first, "second": me.commit(3).ok}


def pass_a_wrong_path_everywhere(rank: int) -> dict[str, Any]:
    me = Rank(rank)
    me.begin()
    copies = me.copy()
    with pytest.raises(NworError, match="counts"):
        me.commit(9)
    return {"unchanged": me.unchanged(copies), "then": me.commit(3).ok}


def write_directly_on_one_rank(rank: int) -> dict[str, Any]:
    me = Rank(rank, **({"max_staging_bytes": 1} if rank == 1 else {}))
    me.begin()
    copies = me.copy()
    first = refusal(me, me.commit(2), copies)
    return first | {"open": me.interceptor.stats()["round_open"]}


def write_directly_everywhere(rank: int) -> dict[str, Any]:
    me = Rank(rank, max_staging_bytes=1)
    me.begin()
    receipt = me.commit(2)
    return {"ok": receipt.ok, "degraded": receipt.degraded, "tokens": receipt.committed_tokens}


def fail_on_one_rank(rank: int, fail: Callable[[Rank], None], message: str) -> dict[str, Any]:
    """Rank 1 gives its commit something wrong and gives the round up; then all is well again."""
    me = Rank(rank)
    me.begin()
    copies = me.copy()
    if rank == 0:
        seen = refusal(me, me.commit(2), copies)
    else:
        with pytest.raises(NworError, match=message):
            fail(me)
        seen = {"unchanged": me.unchanged(copies)}
        if me.interceptor.stats()["round_open"]:
            me.interceptor.abort()
    me.begin()
    return seen | {"then": me.commit(3).ok}


def pass_a_wrong_shape_on_one_rank(rank: int) -> dict[str, Any]:
    counts = torch.ones(2, dtype=torch.int32, device=Rank.device)
    path = torch.ones(1, 3, dtype=torch.int32, device=Rank.device)
    return fail_on_one_rank(rank, lambda me: me.interceptor.commit(path, counts), "counts: got")


def feeding(keys: torch.Tensor) -> CommitTail:
    """Views of one request that hold nothing yet, without its row 0."""
    begin, held = torch.zeros(2, 1, dtype=torch.int32, device=keys.device)
    return CommitTail(keys, keys.clone(), begin, torch.tensor([-1], device=keys.device), held)


def pass_a_wrong_view_on_one_rank(rank: int) -> dict[str, Any]:
    def fail(me: Rank) -> None:
        tail = feeding(torch.zeros(3, 1, HEADS, 8, DIM, device=me.device))
        path = torch.ones(1, 1, dtype=torch.int32, device=me.device)
        me.interceptor.commit(path, path[0], tail=tail)

    return fail_on_one_rank(rank, fail, "tail_keys: got")


def have_no_round_on_one_rank(rank: int) -> dict[str, Any]:
    def fail(me: Rank) -> None:
        me.interceptor.abort()
        me.commit(2)

    return fail_on_one_rank(rank, fail, "commit: no round is open")


def lack_pages_on_one_rank(rank: int) -> dict[str, Any]:
    """Both give the same numbers; only in the cache of rank 1 there is no such slot."""
    me = Rank(rank, pages=PAGES - rank)
    me.begin()
    copies = me.copy()
    outside = (PAGES - 1) * TOKENS
    if rank == 0:
        seen = refusal(me, me.commit(2, [8, outside, -1]), copies)
    else:
        with pytest.raises(NworError, match=f"slots: got {outside} for request 0 at index 1"):
            me.commit(2, [8, outside, -1])
        seen = {"unchanged": me.unchanged(copies)}
        me.interceptor.abort()
    me.begin()
    return seen | {"then": me.commit(3).ok}


def lack_room_in_a_view_on_one_rank(rank: int) -> dict[str, Any]:
    me = Rank(rank)
    me.begin()
    copies = me.copy()
    keys = torch.zeros(2, 1, HEADS, 8 if rank == 0 else 1, DIM)
    tail = feeding(keys)
    path, counts = torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    receipt = me.interceptor.commit(path, counts, tail=tail)
    return {
        "error": receipt.verdict.error,
        "tokens": receipt.committed_tokens,
        "unchanged": me.unchanged(copies) and not keys.any(),
    }


WORK = (
    commit_alike,
    accept_other_counts,
    accept_other_slots,
    lack_a_layer_on_one_rank,
    disagree_and_agree_again,
    pass_a_wrong_path_everywhere,
    write_directly_on_one_rank,
    write_directly_everywhere,
    pass_a_wrong_shape_on_one_rank,
    pass_a_wrong_view_on_one_rank,
    have_no_round_on_one_rank,
    lack_pages_on_one_rank,
    lack_room_in_a_view_on_one_rank,
)


Work = Callable[[int], dict[str, Any]]


def run_rank(
    rank: int, count: int, work: tuple[Work, ...], device: str, backend: str, meeting: str,
    results: Any,
) -> None:  # fmt: skip
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    Rank.device = device
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=600),
    )
    try:
        results.put((rank, {each.__name__: each(rank) for each in work}))
    finally:
        dist.destroy_process_group()


def run_ranks(
    folder: Path, count: int, work: tuple[Work, ...], device: str = "cpu", backend: str = "gloo"
) -> list[dict[str, Any]]:
    """What each rank saw, by the name of the work."""
    results = mp.get_context("spawn").SimpleQueue()
    told = (count, work, device, backend, str(folder / "meeting"), results)
    mp.spawn(run_rank, args=told, nprocs=count)
    found = dict(results.get() for _ in range(count))
    return [found[rank] for rank in range(count)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Started once, as starting takes longest."""
    return run_ranks(tmp_path_factory.mktemp("ranks"), RANKS, WORK)


REFUSED = {
    "ok": False,
    "error": "rank_disagreement",
    "degraded": "rank_disagreement",
    "tokens": 0,
    "unchanged": True,
    "counted": {"rank_disagreement": 1},
}


def test_ranks_that_accept_alike_commit(ranks) -> None:
    for seen in ranks:
        assert seen["commit_alike"] == {"ok": True, "tokens": 2, "changed": [[5, 6]] * 4}


@pytest.mark.parametrize("work", ["accept_other_counts", "accept_other_slots"])
def test_ranks_that_differ_write_nothing(ranks, work: str) -> None:
    for seen in ranks:
        assert seen[work] == REFUSED


def test_a_rank_that_cannot_commit_stops_the_others(ranks) -> None:
    good, bad = (seen["lack_a_layer_on_one_rank"] for seen in ranks)
    assert bad["error"] == bad["degraded"] == "incomplete_staging"
    assert good["error"] == good["degraded"] == "rank_disagreement"
    for result in (good, bad):
        assert result["unchanged"]
        assert result["tokens"] == 0
        assert not result["ok"]


def test_a_disagreement_is_over_with_its_round(ranks) -> None:
    for seen in ranks:
        assert seen["disagree_and_agree_again"] == {"first": False, "second": True}


def test_wrong_input_on_all_ranks_raises_on_all(ranks) -> None:
    for seen in ranks:
        assert seen["pass_a_wrong_path_everywhere"] == {"unchanged": True, "then": True}


def test_a_rank_that_wrote_directly_commits_no_more_than_the_others(ranks) -> None:
    """Its rows lie in their slots as without staging; that they count is what all must agree on."""
    for rank, seen in enumerate(ranks):
        result = seen["write_directly_on_one_rank"]
        assert result == REFUSED | {
            "counted": {"rank_disagreement": 1} | ({"capacity": 1} if rank == 1 else {}),
            "open": False,
        }


def test_ranks_that_all_wrote_directly_agree(ranks) -> None:
    for seen in ranks:
        assert seen["write_directly_everywhere"] == {"ok": True, "degraded": "none", "tokens": 0}


@pytest.mark.parametrize(
    "work",
    [
        "pass_a_wrong_shape_on_one_rank",
        "pass_a_wrong_view_on_one_rank",
        "have_no_round_on_one_rank",
        "lack_pages_on_one_rank",
    ],
)
def test_a_rank_whose_commit_throws_refuses_for_all(ranks, work: str) -> None:
    good, bad = (seen[work] for seen in ranks)
    assert bad == {"unchanged": True, "then": True}
    assert good == REFUSED | {"then": True}


def test_a_fault_that_one_rank_alone_sees_refuses_for_all(ranks) -> None:
    for seen, error in zip(ranks, ("rank_disagreement", "tail_full"), strict=True):
        found = seen["lack_room_in_a_view_on_one_rank"]
        assert found == {"error": error, "tokens": 0, "unchanged": True}


def test_an_unknown_group_is_named() -> None:
    interceptor = Interceptor(NworConfig(agreement_group="nobody"))
    caches = [torch.zeros(PAGES, TOKENS, HEADS, DIM) for _ in range(2)]
    interceptor.bind_layer("layer0", *caches)
    interceptor.begin(RoundPlan([2], [1]))
    interceptor.write(
        "layer0", torch.ones(2, HEADS, DIM), torch.ones(2, HEADS, DIM), torch.tensor([0, 1])
    )
    with pytest.raises(NworError, match="agreement_group: got 'nobody', expected"):
        interceptor.commit(torch.ones(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    assert not caches[0][0, 1].any()
