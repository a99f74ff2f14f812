"""Compact views and a cache in host memory: a Generator says what it says with paged storage."""

from __future__ import annotations

import copy
import gc
import random
from collections import Counter
from functools import cache

import pytest
import torch

from nwor_specpv import CapacityError, CompactViews, Metrics, NworError, SpecPVConfig
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.transformers import Generator
from nwor_specpv.transformers.generate import Generation
from tests.python.specpv.contexts import DEVICES, seeded
from tests.python.transformers.test_specpv_modes import configured
from tests.python.transformers.tiny_models import TREES, Oracle, clear_prompt, tiny

STORAGES = {
    "paged": {},
    "compact": {"specpv_storage": "compact"},
    "offload": {"specpv_storage": "compact", "specpv_offload": True},
}
MODES = ("rectify", "refresh", "lossless")
TREE = TreeConfig(rows=8, depth=4, top_k=2)
KINDS = [("cpu", torch.float32)]
if "cuda" in DEVICES:
    KINDS += [("cuda", torch.float32), ("cuda", torch.bfloat16)]
kinds = pytest.mark.parametrize(("device", "dtype"), KINDS, ids=str)
cuda_only = pytest.mark.skipif("cuda" not in DEVICES, reason="no CUDA device")


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beyond a view, or in none, is NaN whenever a step attends."""
    update = CompactViews.update

    def update_and_poison(self: CompactViews, batch: list) -> None:
        update(self, batch)
        tokens = torch.arange(self._kv.shape[4], device=self._kv.device)
        beyond = tokens >= self._step[0][:, None]  # [B, N]
        self._kv.masked_fill_(beyond[:, None, :, None], float("nan"))

    monkeypatch.setattr(CompactViews, "update", update_and_poison)


@cache
def model_on(device: str, dtype: torch.dtype):
    """Heads of 64 channels, which the CUDA kernels take."""
    return copy.deepcopy(tiny(hidden_size=256)).to(device, dtype)


class World:
    """Prompts and how they go on; generators that differ in storage alone."""

    def __init__(
        self, rng: random.Random, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.model = model_on(device, dtype)
        plain = model_on(device, torch.float32)
        drawn = [clear_prompt(plain, rng, 70, 120) for _ in range(3)]
        self.prompts = [prompt for prompt, _ in drawn]
        self.truths = [truth for _, truth in drawn]
        self._known = {tuple(prompt): truth for prompt, truth in drawn}
        self._seed = rng.randrange(1 << 30)
        # Kernels take blocks of 16; views of less than the shortest prompt.
        half = {"specpv_block_size": 16, "specpv_n_retrieval_blocks": 1}
        self._sizes = half if dtype == torch.bfloat16 else {}

    def config(self, mode: str, storage: str, **values: object) -> SpecPVConfig:
        return configured(mode, **(self._sizes | STORAGES[storage] | values))

    def generator(self, mode: str, storage: str, **options: object) -> Generator:
        drafter = Oracle(self._known, random.Random(self._seed), feature_layers=(1,))
        given = {"drafter": drafter, "specpv": self.config(mode, storage), "pace": False}
        return Generator(self.model, **(given | options))


def assert_same(results: list[Generation]) -> None:
    first = results[0]
    assert first.stats.step_kinds["partial"] > 0
    for result in results:
        assert result.token_ids == first.token_ids
        assert result.finish == first.finish
        assert result.stats.violations == []
        for name in ("step_kinds", "accepted_lengths", "disagreed_tokens", "cut_tokens"):
            assert getattr(result.stats, name) == getattr(first.stats, name)


def offload_failures() -> int:
    return Metrics().snapshot()["specpv_full_steps_total"].get("offload_failure", 0)


@kinds
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tree", [pytest.param("chain", marks=pytest.mark.slow), "tree"])
def test_tokens_are_those_of_paged_storage(
    device: str, dtype: torch.dtype, mode: str, tree: str
) -> None:
    world, failures = World(seeded(), device, dtype), offload_failures()
    alone, batches = [], []
    for storage in STORAGES:
        made = world.generator(mode, storage, check_contract=True)
        alone.append(made.generate(world.prompts[0], 40, tree=TREES[tree]))
        batches.append(made.generate(world.prompts, 40, tree=TREES[tree]))
    assert_same(alone)
    assert_same(batches)
    if mode == "lossless" and dtype == torch.float32:
        assert batches[0].token_ids == [truth[:40] for truth in world.truths]
    assert offload_failures() == failures


@kinds
@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_text(device: str, dtype: torch.dtype, mode: str) -> None:
    world = World(seeded(), device, dtype)
    assert_same(
        [
            world.generator(mode, storage, check_contract=True).generate(
                world.prompts, 24, temperature=0.8, seed=11, tree=TREE
            )
            for storage in STORAGES
        ]
    )


@kinds
@pytest.mark.parametrize("mode", MODES)
def test_requests_that_end_leave_their_place_empty(
    device: str, dtype: torch.dtype, mode: str
) -> None:
    world = World(seeded(), device, dtype)
    # Under the checker as well: in half precision steps without graphs may round otherwise.

    def run(storage: str, stop: int | None = None) -> Generation:
        made = world.generator(mode, storage, check_contract=True)
        return made.generate(world.prompts, 40, eos_token_id=stop, tree=TREE)

    # A request that ends changes what is drafted for others, and so tokens of lossy modes.
    tokens = run("paged").token_ids[1]
    stop = next(token for token in tokens[11::-1] if run("paged", token).finish[1] == "stop")
    results = [run(storage, stop) for storage in STORAGES]
    assert_same(results)
    assert results[0].finish[1] == "stop"
    assert len({len(tokens) for tokens in results[0].token_ids}) > 1


@kinds
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("graphs", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_captured_steps_read_the_copies_of_their_own_step(
    device: str, dtype: torch.dtype, mode: str, graphs: bool
) -> None:
    """Later calls share prefixes with earlier ones and replay what those have captured."""
    world = World(seeded(), device, dtype)
    results: list[list[Generation]] = []
    for storage in STORAGES:
        made = world.generator(mode, storage, cuda_graphs=graphs)
        of_storage = [made.generate(world.prompts, 30, tree=TREE) for _ in range(2)]
        of_storage.append(made.generate(world.prompts[:0:-1], 20, tree=TREE))  # other places
        assert of_storage[1].stats.reused_tokens >= sum(map(len, world.prompts)) - 3
        if device == "cuda" and graphs:
            assert of_storage[1].stats.graph_replays > 0
        results.append(of_storage)
    for same in zip(*results, strict=True):
        assert_same(list(same))


@kinds
@pytest.mark.parametrize("mode", MODES)
def test_steps_without_drafts(device: str, dtype: torch.dtype, mode: str) -> None:
    """Nothing is staged, so no commit feeds the views: the next step copies the root."""
    world = World(seeded(), device, dtype)
    assert_same(
        [
            world.generator(mode, storage, drafter="none", check_contract=True).generate(
                world.prompts, 30
            )
            for storage in STORAGES
        ]
    )


@pytest.mark.parametrize("device", DEVICES)
def test_lossless_steps_that_choose_their_pace(device: str) -> None:
    world = World(seeded(), device)
    made = world.generator("lossless", "offload", pace=True, check_contract=True)
    result = made.generate(world.prompts, 40, tree=TREE)
    assert result.token_ids == [truth[:40] for truth in world.truths]
    assert result.stats.violations == []


@kinds
def test_accepted_rows_come_from_the_commit(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a refresh makes a copy: later views hold all of their tokens before the gather."""
    world, copied = World(seeded(), device, dtype), Counter()
    gather = CompactViews._gather

    def watch(self: CompactViews) -> None:
        for held, length in zip(self._held.tolist(), self._step[0].tolist(), strict=True):
            if length >= 0:
                assert held in (0, length)
                copied["after a refresh" if held == 0 else "never"] += 1
        gather(self)

    monkeypatch.setattr(CompactViews, "_gather", watch)
    # Trees of at least two rows: a round without drafts has no commit to feed a view.
    made = world.generator("refresh", "compact")
    made.generate(world.prompts, 40, tree=TREE)
    assert copied["never"] > 0
    assert copied["after a refresh"] > 0


@kinds
@pytest.mark.parametrize("storage", ["compact", "offload"])
@pytest.mark.parametrize("always", [True, False])
def test_a_gather_that_fails_shows_the_whole_prefix(
    device: str,
    dtype: torch.dtype,
    storage: str,
    always: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world, rng = World(seeded(), device, dtype), random.Random(5)
    before, gather, failed = offload_failures(), CompactViews._gather, 0

    def fail(self: CompactViews) -> None:
        nonlocal failed
        if (self._step[0] >= 0).any() and (always or failed == 0 or rng.random() < 0.3):
            failed += 1
            raise RuntimeError("injected: the bus is gone")
        gather(self)

    monkeypatch.setattr(CompactViews, "_gather", fail)
    with caplog.at_level("WARNING", logger="nwor_specpv"):
        result = world.generator("lossless", storage, check_contract=True).generate(
            world.prompts, 40, tree=TREE
        )
    assert failed > 0
    assert offload_failures() > before
    assert sum("the bus is gone" in record.getMessage() for record in caplog.records) == 1
    assert result.stats.violations == []
    if dtype != torch.float32:
        return
    assert result.token_ids == [truth[:40] for truth in world.truths]
    if always:  # every step has seen everything, so nothing drifts in any mode
        assert result.stats.cut_tokens == 0
        for mode in ("rectify", "refresh"):
            drifting = world.generator(mode, storage).generate(world.prompts, 40, tree=TREE)
            assert drifting.token_ids == result.token_ids
            assert drifting.stats.disagreed_tokens == 0


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_budget_that_the_cache_exceeds_names_the_remedy(device: str) -> None:
    world = World(seeded(), device)
    token_bytes = world.generator("lossless", "paged")._runner.token_bytes
    limit = 64 * 16 * token_bytes // 2  # half of the smallest cache
    for storage in ("paged", "compact"):
        made = world.generator("lossless", storage, gpu_cache_bytes=limit)
        with pytest.raises(CapacityError, match=f"gpu_cache_bytes: got {limit}, .*specpv_offload"):
            made.generate(world.prompts, 40, tree=TREE)
    made = world.generator("lossless", "offload", gpu_cache_bytes=limit)
    result = made.generate(world.prompts, 40, tree=TREE)
    assert result.token_ids == [truth[:40] for truth in world.truths]
    assert result.stats.step_kinds["partial"] > 0


def test_a_refused_cache_leaves_the_one_before() -> None:
    world = World(seeded())
    made = world.generator("lossless", "paged")
    limit = made._runner.token_bytes * 64 * 16 * 2
    made = world.generator("lossless", "paged", gpu_cache_bytes=limit)
    first = made.generate(world.prompts, 40, tree=TREE)
    with pytest.raises(CapacityError, match="for K/V of"):
        made.generate([world.prompts[0]] * 20, 40, tree=TREE)
    again = made.generate(world.prompts, 40, tree=TREE)
    assert again.token_ids == first.token_ids
    assert again.stats.reused_tokens > 0


def test_views_count_for_the_budget_too() -> None:
    world = World(seeded())
    made = world.generator("lossless", "offload", gpu_cache_bytes=4096)
    with pytest.raises(CapacityError, match=r"0 for the cache, .* views .*n_retrieval_blocks"):
        made.generate(world.prompts, 40, tree=TREE)
    with pytest.raises(NworError, match="gpu_cache_bytes: got 0, expected 1 or more"):
        world.generator("lossless", "paged", gpu_cache_bytes=0)


def test_who_shares_a_cache_shares_where_it_is() -> None:
    world = World(seeded())
    for storage, other in (("offload", "compact"), ("compact", "offload"), ("offload", "paged")):
        made = world.generator("lossless", storage)
        made.generate(world.prompts[0], 8, tree=TREE)
        with pytest.raises(NworError, match=r"specpv_offload: got .* beside cache_of"):
            Generator(specpv=world.config("lossless", other), cache_of=made)
        with pytest.raises(NworError, match="gpu_cache_bytes: cannot be given with cache_of"):
            Generator(cache_of=made, gpu_cache_bytes=1)
        full = Generator(drafter="none", cache_of=made)  # full steps over the same cache
        result = full.generate(world.prompts[0], 16)
        assert result.token_ids == world.truths[0][:16]
        assert result.stats.reused_tokens > 0


@cuda_only
def test_an_offloaded_cache_takes_no_memory_of_the_device() -> None:
    model = model_on("cuda", torch.bfloat16)
    taken = {}
    for storage in ("paged", "offload"):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        config = configured("lossless", specpv_block_size=16, **STORAGES[storage])
        made = Generator(model, drafter="none", specpv=config, cache_tokens=1 << 16)
        taken[storage] = torch.cuda.memory_allocated() - before
        assert made._runner.cache.keys.is_cuda
        size = 2 * made._runner.cache.keys.nbytes
        del made
        gc.collect()
    assert taken["paged"] >= size
    assert taken["offload"] < size // 10
