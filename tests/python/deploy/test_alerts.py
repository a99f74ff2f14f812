"""Each alert is raised by a fault that happens here, through the process' own counters.

A scenario makes a fault happen. What it adds to the scraped series is repeated every minute, and
promtool says which alerts that raises. What refused commits add is found on a GPU, without
promtool, and the same series are given to promtool anywhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml

from nwor_specpv import (
    COMMIT_ERRORS,
    CommitTail,
    ContractChecker,
    Interceptor,
    Metrics,
    NworConfig,
    RoundPlan,
)
from nwor_specpv.vllm.faults import LASTING, Faults
from nwor_specpv.vllm.specpv.failures import DraftFailures
from tests.python.kv_interceptor.made_up_group import NAME, REFUSAL, other_rank
from tests.python.vllm.test_steps import World

RULES = Path(__file__).resolve().parents[3] / "deploy" / "prometheus" / "alerts.yml"
PAGES, SIZE, HEADS, DIM = 4, 16, 2, 64
SLOTS = [3, 4, 5, 6]  # of a root and three drafts
LOST, OFF, FAIL = "NworAcceptedTokensLost", "NworStagingOff", "NworCommitsFail"
RANKS = "NworRanksDisagree"

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing")


def scrape() -> dict[str, float]:
    """Values by series. HELP and TYPE lines are left out."""
    lines = re.findall(r"^((?:nwor|specpv)_\S+) (\S+)$", Metrics().render(), re.MULTILINE)
    return {series: float(value) for series, value in lines}


def gauges() -> set[str]:
    return set(re.findall(r"^# TYPE (\S+) gauge$", Metrics().render(), re.MULTILINE))


class Round:
    """An interceptor with two layers, and rounds of a root and three drafts."""

    def __init__(self, device: str = "cpu", **config: Any) -> None:
        self.device = device
        shape = (PAGES, SIZE, HEADS, DIM)
        self.caches = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(4)]
        self.interceptor = Interceptor(NworConfig(**config))
        for layer in range(2):
            pair = self.caches[2 * layer : 2 * layer + 2]
            self.interceptor.bind_layer(str(layer), *pair)

    def write(self, *slots: list[int]) -> None:
        """Both layers; each to its own slots, if there are two lists."""
        self.interceptor.begin(RoundPlan([4], [3]))
        for layer in range(2):
            rows = torch.ones(4, HEADS, DIM, dtype=torch.bfloat16, device=self.device)
            chosen = torch.tensor((slots or (SLOTS,))[layer % len(slots or (SLOTS,))])
            self.interceptor.write(str(layer), rows, rows, chosen.to(self.device))

    def commit(self, path: list[int], count: int, **more: Any) -> Any:
        entries = torch.tensor([path], dtype=torch.int32, device=self.device)
        counts = torch.tensor([count], dtype=torch.int32, device=self.device)
        return self.interceptor.commit(entries, counts, **more)


def break_the_contract() -> None:
    world = Round()
    checker = ContractChecker(world.interceptor)
    checker.snapshot()
    world.write()
    world.caches[0][3, 3].fill_(7)  # a slot of nobody
    assert checker.verify_staged()
    assert world.commit([1, 2, 3], 3).ok


def stage_too_much() -> None:
    world = Round(max_staging_bytes=1)
    world.write()
    assert world.commit([1, 2, 3], 3).ok


def abort() -> None:
    world = Round()
    world.write()
    world.interceptor.abort()
    world.write()
    world.commit([1, 2, 3], 3)


def accept_nothing() -> None:
    world = Round()
    world.write()
    assert world.commit([-1, -1, -1], 0).ok


def mix_up_slots() -> None:
    world = Round()
    world.write(SLOTS, [3, 4, 5, 9])
    assert not world.commit([1, 2, 3], 3).ok


def pause() -> Any:
    """The gauge is up as long as the engine is."""
    found = Faults(recovers=True)
    found.stop("incomplete_staging", "made up")
    return found


def fail_to_draft() -> None:
    DraftFailures(single_rank=True).add(RuntimeError("made up"), "without drafts", "start")


def fail_in_the_worker() -> None:
    grpc = pytest.importorskip("grpc")
    from nwor_specpv.worker.accounting import CallAccount

    CallAccount(SimpleNamespace(ByteSize=lambda: 1)).failed(grpc.StatusCode.INTERNAL)


def refuse(reason: str) -> Any:
    """The status words are those of a commit that a GPU has refused; the next step reads them."""
    world = World(recovers=True, call=-1)
    words = torch.tensor([COMMIT_ERRORS.index(reason), 0, 1, 9, 0, 0, 0, 0])
    inner = world.interceptor
    commit = type(inner).commit

    def refused(*args: Any, **kwargs: Any) -> Any:
        commit(inner, *args, **kwargs)
        return SimpleNamespace(status=words)

    inner.commit = refused
    world.steps._learns_late = lambda _: True
    world.finish(4)
    assert not world.faults.drafts_are_off, "nobody has waited for the GPU"
    world.finish(0)
    assert inner.stats()["fallbacks"] == {"commit_lost": 1}
    assert world.faults.drafts_are_off
    notice = world.faults.take()
    assert notice is not None
    assert notice.lost
    return world.faults


SCENARIOS: dict[str, tuple[Callable[[], Any], set[str]]] = {
    "a broken contract": (break_the_contract, {"NworContractViolated"}),
    "too little staging": (stage_too_much, {"NworStagingTooSmall"}),
    "aborted rounds": (abort, {"NworRoundsAborted"}),
    "nothing accepted": (accept_nothing, {"NworFewDraftsAccepted"}),
    "layers that disagree": (mix_up_slots, {FAIL}),
    "drafts that ended": (pause, {OFF}),
    "drafting fails": (fail_to_draft, {"SpecpvDraftingFails"}),
    "the worker's model fails": (fail_in_the_worker, {"NworWorkerCallsFail"}),
    **{
        f"a GPU refused: {reason}": (lambda reason=reason: refuse(reason), {LOST, OFF})
        for reason in COMMIT_ERRORS[1:]
    },
}


def added_by(scenario: Callable[[], Any]) -> dict[str, float]:
    """What the series have more than before, while what the scenario returns is alive."""
    before = scrape()
    kept = scenario()
    found = {series: value - before.get(series, 0.0) for series, value in scrape().items()}
    del kept
    assert any(found.values())
    return found


def values(series: str, added: float) -> str:
    return f"{added:g}x90" if series.partition("{")[0] in gauges() else f"0+{added:g}x90"


def check(tmp_path: Path, cases: dict[str, tuple[dict[str, float], set[str]]]) -> None:
    """Each case raises its alerts and no others."""
    tests = [
        {
            "name": name,
            "interval": "1m",
            "input_series": [
                {"series": series, "values": values(series, value)}
                for series, value in added.items()
            ],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"}) > bool 0',
                    "eval_time": "85m",
                    "exp_samples": [
                        {"labels": f'{{alertname="{alert}"}}', "value": 1}
                        for alert in sorted(raised)
                    ],
                }
            ],
        }
        for name, (added, raised) in cases.items()
    ]
    told = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(told))
    command = ["promtool", "test", "rules", str(tmp_path / "tests.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def disagree(rank: int, meeting: str, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        world = Round(agreement_group=dist.group.WORLD.group_name)
        before = scrape()
        world.write()
        assert not world.commit([1, 2, 3], 1 + rank).ok
        results.put({name: value - before[name] for name, value in scrape().items()})
    finally:
        dist.destroy_process_group()


@needs_promtool
def test_every_alert_is_raised_by_what_really_happens(tmp_path: Path) -> None:
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(disagree, args=(str(tmp_path / "meeting"), results), nprocs=2)
    cases = {name: (added_by(make), raised) for name, (make, raised) in SCENARIOS.items()}
    cases |= {f"ranks that disagree, {rank}": (results.get(), {RANKS}) for rank in range(2)}
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    assert set().union(*(raised for _, raised in cases.values())) == alerts
    assert {f"a GPU refused: {reason}" for reason in LASTING & {*COMMIT_ERRORS}} < cases.keys()
    check(tmp_path, cases)


# ---- commits that a GPU refuses ----

Spoil = Callable[[Callable[..., Any], torch.Tensor, torch.Tensor], Any]


def as_it_is(commit: Callable[..., Any], path: torch.Tensor, counts: torch.Tensor) -> Any:
    return commit(path, counts, rows="request")


def with_count(commit: Callable[..., Any], path: torch.Tensor, counts: torch.Tensor) -> Any:
    return commit(path, counts + 1, rows="request")


def with_path(*rows: int) -> Spoil:
    return lambda commit, path, counts: commit(
        torch.tensor([rows]).to(path), counts, rows="request"
    )


def with_slots(*slots: int) -> Spoil:
    return lambda commit, path, counts: commit(
        path, counts, [torch.tensor([slots], device=path.device)], rows="request"
    )


def with_small_view(commit: Callable[..., Any], path: torch.Tensor, counts: torch.Tensor) -> Any:
    keys = torch.zeros(2, 1, HEADS, 1, DIM, dtype=torch.bfloat16, device=path.device)
    begin, held = torch.zeros(2, 1, dtype=torch.int32, device=path.device)
    no_root = torch.tensor([-1], device=path.device)
    tail = CommitTail(keys, keys.clone(), begin, no_root, held)
    return commit(path, counts, rows="request", tail=tail)


# What is wrong with a step: its commit, and how far from the first layer's slots the second one
# writes; None: it writes nothing.
SPOILED: dict[str, tuple[Spoil, int | None]] = {
    "count_range": (with_count, 0),
    "path_range": (with_path(1, 2, 3, 9), 0),
    "not_a_chain": (with_path(1, 3, 2, 4), 0),
    "slot_range": (with_slots(4, 5, 6, 2**40), 0),
    "duplicate_slot": (with_slots(4, 5, 6, 4), 0),
    "slot_mismatch": (as_it_is, 16),
    "incomplete_staging": (as_it_is, None),
    "rank_disagreement": (as_it_is, 0),
    "tail_full": (with_small_view, 0),
}


def refuse_on(device: str, reason: str) -> Any:
    """A step whose four drafts are accepted, one that a GPU refuses, and one that reads it."""
    spoil, by = SPOILED[reason]
    group = NAME if reason == "rank_disagreement" else ""
    with other_rank() as other:
        world = World(call=-1, layers=2, recovers=True, device=device, agreement_group=group)
        world.finish(4)
        other.words = REFUSAL
        world.begin()
        world.write("a")
        if by is not None:
            world.write("b", by)
        commit = world.interceptor.commit
        world.interceptor.commit = lambda path, counts, *_, **__: spoil(commit, path, counts)
        world.finish(4)
        assert not world.faults.drafts_are_off, "nobody has waited for the GPU"
        world.finish(0)
    torch.cuda.synchronize()
    return world


def series_of(reason: str) -> dict[str, float]:
    """What that adds on a GPU."""
    found = {
        "nwor_rounds_total": 2,
        "nwor_staged_tokens_total": 8,
        "nwor_committed_tokens_total": 4,
        "nwor_failed_tokens_total": 4,
        f'nwor_commit_failures_total{{reason="{reason}"}}': 1,
        'nwor_fallback_total{reason="commit_lost"}': 1,
        "nwor_staging_off_engines": 1,
    }
    if reason == "incomplete_staging":  # the host knows it without the GPU
        found['nwor_fallback_total{reason="incomplete_staging"}'] = 1
    return found


def of_alerts(series: dict[str, float]) -> dict[str, float]:
    """Those that a rule looks at."""
    named = set(re.findall(r"\b(?:nwor|specpv)_[a-z_]+\b", RULES.read_text()))
    return {name: value for name, value in series.items() if name.partition("{")[0] in named}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("reason", SPOILED)
def test_what_a_refusal_on_cuda_counts(reason: str) -> None:
    """By the status words of our kernels, which the next step reads."""
    added = of_alerts(added_by(lambda: refuse_on("cuda", reason)))
    assert {name: value for name, value in added.items() if value} == series_of(reason)


@needs_promtool
def test_what_a_refusal_counts_raises_its_alerts(tmp_path: Path) -> None:
    """The series that the test before finds on a GPU."""
    of_a_cpu = {"ok", "stale_round", "write_failed"}
    assert {*SPOILED} == {*COMMIT_ERRORS} - of_a_cpu
    still = dict.fromkeys(of_alerts(scrape()), 0.0)
    failed = {reason: RANKS if reason == "rank_disagreement" else FAIL for reason in SPOILED}
    cases = {
        f"a GPU refused: {reason}": (still | series_of(reason), {LOST, OFF, alert})
        for reason, alert in failed.items()
    }
    check(tmp_path, cases)
