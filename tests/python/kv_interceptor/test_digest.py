"""What a rank tells the others of a commit, on the CPU and on CUDA, and what their answers do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nwor_specpv import Interceptor, NworConfig, RoundPlan
from tests.python.kv_interceptor.cuda_caches import SEED
from tests.python.kv_interceptor.made_up_group import (
    DIRECT,
    NAME,
    REFUSAL,
    OtherRank,
    other_rank,
)

PAGE_SIZE, HEADS, DIM = 16, 1, 8
CASES = 60
cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=cuda_only)]


@pytest.fixture
def group() -> Iterator[OtherRank]:
    with other_rank() as found:
        yield found


# ---- random commits ----


@dataclass
class Case:
    """A round and what of it is accepted."""

    plan: RoundPlan
    layers: list[int]  # the cache group of each
    mappings: list[torch.Tensor]  # [T] of each group
    path: torch.Tensor  # [B, depth]
    counts: torch.Tensor
    slots: list[torch.Tensor] | None  # [B, depth] of each group; None: those of the write
    rows: str
    chunks: list[tuple[int, int]]  # columns of the path

    @classmethod
    def draw(cls, rng: random.Random) -> Case:
        kind = rng.choice(("chains", "trees", "ascending"))
        lens, drafts, parents, paths = [], [], [], []
        for _ in range(rng.choice((1, 2, 5, 40, 150))):
            lead, count = rng.randint(1, 3), rng.choice((0, 1, 3, 6))
            lens.append(lead + count)
            drafts.append(count)
            parents.append(
                [
                    row - 1 if kind != "trees" else rng.randint(lead - 1, row - 1)
                    for row in range(lead, lead + count)
                ]
            )
            paths.append(cls._accepted(rng, kind, lead, parents[-1]))
        if not any(drafts):
            return cls.draw(rng)
        plan = RoundPlan(
            lens, drafts, parents if kind == "trees" else [], ascending=kind == "ascending"
        )
        counts = [len(path) for path in paths]
        depth = max(counts) + rng.randint(0, 2)
        rows, base = rng.choice(("request", "batch")), 0
        path = torch.full((len(lens), depth), -1, dtype=torch.int32)
        for b, accepted in enumerate(paths):
            for i, row in enumerate(accepted):
                path[b, i] = row if rows == "request" else base + row
            base += lens[b]
        groups = rng.randint(1, 3)
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        places = [
            torch.randperm(base + path.numel() + 7 * g, generator=generator) for g in range(groups)
        ]
        given = [one[base : base + path.numel()].view(path.shape) for one in places]
        cut = rng.randint(1, max(1, depth - 1))
        return cls(
            plan,
            layers=[*range(groups), *(rng.randrange(groups) for _ in range(rng.randint(0, 2)))],
            mappings=[one[:base].contiguous() for one in places],
            path=path,
            counts=torch.tensor(counts, dtype=torch.int32),
            slots=rng.choice((None, given)),
            rows=rows,
            chunks=[(0, depth)] if depth < 2 or rng.random() < 0.6 else [(0, cut), (cut, depth)],
        )

    @staticmethod
    def _accepted(rng: random.Random, kind: str, lead: int, parents: list[int]) -> list[int]:
        """Rows of the request, the first of them a child of its root."""
        if not parents or rng.random() < 0.2:
            return []
        if kind == "ascending":
            drafts = range(lead, lead + len(parents))
            return sorted(rng.sample(drafts, rng.randint(1, len(parents))))
        found, row = [], lead + rng.randrange(len(parents))
        while row >= lead:
            found.insert(0, row)
            row = parents[row - lead]
        return found

    def play(self, device: str) -> list[torch.Tensor]:
        """The caches after it, on the CPU."""
        interceptor = Interceptor(NworConfig(agreement_group=NAME))
        generator = torch.Generator().manual_seed(1)

        def rows(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device)

        caches = []
        for layer, g in enumerate(self.layers):
            pages = -(-(int(self.mappings[g].numel()) + self.path.numel() + 7 * g) // PAGE_SIZE)
            caches += [rows(pages, PAGE_SIZE, HEADS, DIM) for _ in range(2)]
            interceptor.bind_layer(str(layer), *caches[-2:], group=g)
        assert interceptor.begin(self.plan).stage
        for layer, g in enumerate(self.layers):
            pair = [rows(len(self.mappings[g]), HEADS, DIM) for _ in range(2)]
            interceptor.write(str(layer), *pair, self.mappings[g].to(device))
        for begin, end in self.chunks:
            receipt = interceptor.commit(
                self.path[:, begin:end].contiguous().to(device),
                (self.counts - begin).clamp(0, end - begin).to(device),
                self.slots and [one[:, begin:end].contiguous().to(device) for one in self.slots],
                rows=self.rows,
                last=end == self.path.shape[1],
            )
            assert receipt.ok, receipt.verdict
        return [cache.cpu() for cache in caches]


def draw_cases() -> list[Case]:
    print(f"NWOR_TEST_SEED={SEED}")
    return [Case.draw(random.Random(SEED + number)) for number in range(CASES)]


def check_told(told: list[list[int]], cases: list[Case]) -> None:
    assert len(told) == sum(len(case.chunks) for case in cases)
    assert all(second == ~first for first, second in told)
    assert len({first for first, _ in told}) > 0.9 * len(told), "small commits may be alike"


def test_every_commit_has_a_digest_of_its_own(group: OtherRank) -> None:
    cases = draw_cases()
    for case in cases:
        case.play("cpu")
    check_told(group.told, cases)


@cuda_only
def test_cuda_has_the_digests_of_the_cpu(group: OtherRank) -> None:
    cases = draw_cases()
    for number, case in enumerate(cases):
        group.told.clear()
        caches = case.play("cpu")
        expected = list(group.told)
        group.told.clear()
        on_device = case.play("cuda")
        assert group.told == expected, f"case {number} of seed {SEED}: {case}"
        for one, other in zip(caches, on_device, strict=True):
            assert torch.equal(one, other), f"case {number} of seed {SEED}"
        check_told(group.told, [case])


# ---- one commit, and what the other rank says ----


class World:
    """Two layers and a round of two requests, five drafts."""

    PLAN = RoundPlan([4, 3], [3, 2])
    SLOTS = (20, 21, 22, 23, 40, 41, 42)

    def __init__(self, device: str, **config: Any) -> None:
        torch.manual_seed(4)
        self.device = device
        self.caches = [torch.randn(4, PAGE_SIZE, HEADS, DIM).to(device) for _ in range(4)]
        self.interceptor = Interceptor(NworConfig(agreement_group=NAME, **config))
        for layer in range(2):
            self.interceptor.bind_layer(str(layer), *self.caches[2 * layer : 2 * layer + 2])

    def write(self, *slots: tuple[int, ...]) -> None:
        """The first layers, each to slots of its own."""
        self.interceptor.begin(self.PLAN)
        for layer, where in enumerate(slots or (self.SLOTS, self.SLOTS)):
            rows = [torch.randn(7, HEADS, DIM).to(self.device) for _ in range(2)]
            self.interceptor.write(str(layer), *rows, torch.tensor(where).to(self.device))
        self.before = [cache.clone() for cache in self.caches]

    def commit(self, counts: tuple[int, int] = (3, 1)) -> Any:
        path = torch.tensor([[1, 2, 3], [5, 6, -1]], dtype=torch.int32, device=self.device)
        accepted = torch.tensor(counts, dtype=torch.int32, device=self.device)
        return self.interceptor.commit(path, accepted)

    def expect_refusal(self, receipt: Any, error: str, value: int | None = None) -> None:
        assert not receipt.ok
        assert (receipt.verdict.error, receipt.committed_tokens) == (error, 0)
        assert value is None or receipt.verdict.value == value
        for cache, before in zip(self.caches, self.before, strict=True):
            assert torch.equal(cache, before)

    def expect_commit(self) -> None:
        """The next round is all right."""
        self.write()
        receipt = self.commit()
        assert receipt.ok
        assert receipt.committed_tokens == 4
        for cache, before in zip(self.caches, self.before, strict=True):
            changed = (cache != before).flatten(2).any(-1).flatten().nonzero().flatten()
            assert changed.tolist() == [21, 22, 23, 41]


@pytest.mark.parametrize("device", DEVICES)
def test_a_rank_commits_what_the_other_one_accepted_too(device: str, group: OtherRank) -> None:
    World(device).expect_commit()
    assert len(group.told) == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by", [1, -1, 2**62])
def test_another_digest_refuses(device: str, by: int, group: OtherRank) -> None:
    world = World(device)
    world.expect_commit()
    own = group.told[0][0]
    other = (own + by + 2**63) % 2**64 - 2**63
    group.words = [other, ~other]
    world.write()
    world.expect_refusal(world.commit(), "rank_disagreement", max(own, other))
    stats = world.interceptor.stats()
    assert stats["commit_failures"] == {"rank_disagreement": 1}
    assert (stats["failed_tokens"], stats["committed_tokens"]) == (5, 4)
    group.words = None
    world.expect_commit()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [REFUSAL, DIRECT], ids=["cannot commit", "wrote directly"])
def test_a_rank_that_has_nothing_to_commit_stops_this_one(
    device: str, words: list[int], group: OtherRank
) -> None:
    world = World(device)
    group.words = words
    world.write()
    world.expect_refusal(world.commit(), "rank_disagreement")
    group.words = None
    world.expect_commit()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fault", ["slot_mismatch", "incomplete_staging"])
def test_a_rank_with_a_fault_agrees_with_nobody_and_tells_its_own(
    device: str, fault: str, group: OtherRank
) -> None:
    world = World(device)
    slots = World.SLOTS
    world.write(slots, *([(*slots[:6], 9)] if fault == "slot_mismatch" else []))
    world.expect_refusal(world.commit(), fault)
    assert group.told == [REFUSAL]
    world.expect_commit()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", [None, REFUSAL, [7, ~7]], ids=["alike", "cannot", "staged"])
def test_a_round_that_was_written_directly(
    device: str, words: list[int] | None, group: OtherRank
) -> None:
    world = World(device, max_staging_bytes=1)
    world.write()
    group.words = words
    receipt = world.commit()
    assert group.told == [DIRECT]
    assert receipt.ok == (words is None)
    assert receipt.verdict.error == ("ok" if words is None else "rank_disagreement")
    assert receipt.committed_tokens == 0


@cuda_only
@pytest.mark.parametrize("count", [-1, 4, 2**30])
def test_cuda_digest_of_a_wrong_count_reads_no_further(count: int, group: OtherRank) -> None:
    """The count is told to the other ranks, and refused by this one's own commit."""
    world = World("cuda")
    world.expect_commit()
    world.write()
    world.expect_refusal(world.commit((3, count)), "count_range", count)
    right, wrong = group.told
    assert wrong[1] == ~wrong[0]
    assert wrong != right
