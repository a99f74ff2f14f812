"""Two ranks over gloo on the loopback draft over views together, or neither does.

The drafts are those of model runner V2 with a made-up head and target (`speculator_world`);
vLLM runs it on GPUs only. Ranks of the real engine are in `test_tensor_parallel`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS, BROKEN = 2, 1


class Rank:
    """One rank's speculator, and what it has counted."""

    def __init__(self) -> None:
        from vllm.distributed import parallel_state

        from nwor_specpv.vllm.specpv import proposals
        from nwor_specpv.vllm.specpv import speculator as module
        from nwor_specpv.vllm.specpv.failures import DraftFailures
        from support import speculator_world as double

        self.double, self.patches = double, pytest.MonkeyPatch()
        group = SimpleNamespace(cpu_group=dist.group.WORLD)
        self.patches.setattr(parallel_state, "get_tp_group", lambda: group)
        self.world = double.World([[n % double.WORDS for n in range(300)]])
        self.spec = double.make(self.world, self.patches)
        self.failures = self.spec._engine.draft_failures = DraftFailures(single_rank=False)
        self.patches.setattr(module.EagleSpeculator, "propose", lambda *_: None)
        self.patches.setattr(module.EagleSpeculator, "capture", lambda _: None)
        self.patches.setattr(proposals, "graph_capture", lambda device: contextlib.nullcontext())
        self.before = counted()

    def propose(self) -> list[int]:
        batch = self.double.step(self.world, self.spec, [299], [0])
        roots = torch.full((self.double.BATCH, 1), self.world.texts[0][-1])
        drafts = self.double.propose(self.spec, batch, last_sampled=roots)
        return drafts[0].tolist()

    def capture(self) -> None:
        manager = SimpleNamespace(graphs=[SimpleNamespace(num_reqs=1, uniform_token_count=2)])
        self.spec.prefill_cudagraph_manager = manager
        self.spec.capture()

    def report(self, **more: Any) -> dict[str, Any]:
        now = counted()
        return more | {
            "failed": {reason: now[reason] - self.before.get(reason, 0) for reason in now},
            "latest": self.failures.latest,
            "gives_up": self.spec.lengths.given_up,
        }


def counted() -> dict[str, int]:
    from nwor_specpv import Metrics

    return Metrics().snapshot()["specpv_draft_failures_total"]


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("injected")


def draft_alike(rank: int) -> dict[str, Any]:
    me = Rank()
    return me.report(drafts=[me.propose(), me.propose()])


def fail_before_a_pass(rank: int) -> dict[str, Any]:
    me = Rank()
    first = me.propose()
    if rank == BROKEN:
        me.patches.setattr(me.spec, "_view_rows", fail)
    return me.report(drafts=[first, me.propose(), me.propose()])


def fail_in_a_pass(rank: int) -> dict[str, Any]:
    """The second pass of a proposal without graphs, which goes on to its end on both ranks."""
    me = Rank()
    forward, passes = me.world.forward, []

    def failing(passed: Any, *args: Any) -> Any:
        passes.append(passed.failure is None)
        if rank == BROKEN and len(passes) == 2:
            assert passed.keeps_failure
            passed.failure = RuntimeError("injected")  # as `attend` keeps it
        return forward(passed, *args)

    me.world.forward = failing
    return me.report(drafts=[me.propose(), me.propose()], passes=passes)


def fail_in_the_model(rank: int) -> dict[str, Any]:
    """On both, for nobody to wait: none may go on."""
    from nwor_specpv.vllm.specpv.failures import RankError

    me = Rank()
    me.world.forward = fail
    with pytest.raises(RankError, match="restart the server: RuntimeError: injected"):
        me.propose()
    return me.report()


def capture_with(record: Callable[[Rank, int], Any]) -> Callable[[int], dict[str, Any]]:
    def work(rank: int) -> dict[str, Any]:
        me = Rank()
        me.world.texts += [[]] * (me.double.BATCH - 1)
        me.world.forward = me.double.forward_of_nobody
        me.patches.setattr(me.spec, "_record", record(me, rank))
        me.capture()
        return me.report(graphs=len(me.spec._graphs))

    return work


def record_all(me: Rank, rank: int) -> Any:
    return lambda run: SimpleNamespace(replay=run)


def record_two_on_one(me: Rank, rank: int) -> Any:
    def record(run: Any) -> Any:
        if rank == BROKEN and len(me.spec._graphs) == 2:
            raise torch.OutOfMemoryError("injected")
        return SimpleNamespace(replay=run)

    return record


WORK: dict[str, Callable[[int], dict[str, Any]]] = {
    "draft_alike": draft_alike,
    "fail_before_a_pass": fail_before_a_pass,
    "fail_in_a_pass": fail_in_a_pass,
    "fail_in_the_model": fail_in_the_model,
    "capture": capture_with(record_all),
    "capture_too_little": capture_with(record_two_on_one),
}


def run_rank(rank: int, meeting: str, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=600),
    )
    try:
        results.put((rank, {name: work(rank) for name, work in WORK.items()}))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw, by the name of the work; started once, as starting takes longest."""
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(run_rank, args=(str(meeting), results), nprocs=RANKS)
    found = dict(results.get() for _ in range(RANKS))
    return [found[rank] for rank in range(RANKS)]


def check_given_up(ranks: list[dict[str, Any]], work: str) -> None:
    for rank, seen in enumerate(ranks):
        assert seen[work]["gives_up"]
        assert sum(seen[work]["failed"].values()) == 1
        assert ("OtherRankError" in seen[work]["latest"]) == (rank != BROKEN)


def test_ranks_that_are_well_draft(ranks: list) -> None:
    for seen in ranks:
        found = seen["draft_alike"]
        assert any(found["drafts"][0])
        assert found["drafts"] == ranks[0]["draft_alike"]["drafts"]
        assert not any(found["failed"].values())
        assert not found["gives_up"]


def test_a_rank_that_is_not_ready_stops_the_drafting_of_all(ranks: list) -> None:
    check_given_up(ranks, "fail_before_a_pass")
    for seen in ranks:
        first, second, third = seen["fail_before_a_pass"]["drafts"]
        assert any(first)
        assert not any(second)
        assert third == [first[0], *second[1:]], "the head's, no pass follows"


def test_a_pass_that_fails_on_one_rank_is_gone_through_by_all(ranks: list) -> None:
    check_given_up(ranks, "fail_in_a_pass")
    for rank, seen in enumerate(ranks):
        found = seen["fail_in_a_pass"]
        assert not any(found["drafts"][0])
        assert not any(found["drafts"][1][1:]), "the head's, no pass follows"
        # What has failed does nothing of ours in later passes, whose views are not there.
        assert found["passes"] == [True, True, rank != BROKEN]


def test_what_fails_in_the_model_ends_the_worker(ranks: list) -> None:
    for seen in ranks:
        assert seen["fail_in_the_model"]["failed"]["error"] == 1


def test_all_ranks_have_graphs_of_drafting_or_none_has_them(ranks: list) -> None:
    check_given_up(ranks, "capture_too_little")
    for rank, seen in enumerate(ranks):
        reason = "out_of_memory" if rank == BROKEN else "start"
        assert seen["capture_too_little"]["failed"][reason] == 1
        assert seen["capture_too_little"]["graphs"] == 0
        assert seen["capture"]["graphs"] == 4
        assert not seen["capture"]["gives_up"]
        assert not any(seen["capture"]["failed"].values())
