"""Steps of fixed shapes: on CUDA captured and replayed, on the CPU padded the same way."""

from __future__ import annotations

import contextlib
import copy
import random
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from nwor_specpv import Interceptor, NworConfig, SlotAllocator
from nwor_specpv.drafters import TreeConfig
from nwor_specpv.transformers import Generator
from nwor_specpv.transformers.graphs import StepGraphs
from nwor_specpv.transformers.layers.float32_attention import float32_attention
from nwor_specpv.transformers.paged import _BlockTables
from tests.python.attention.steps import Shape, make_step
from tests.python.specpv.contexts import DEVICES, seeded
from tests.python.transformers.test_specpv_modes import configured
from tests.python.transformers.tiny_models import (
    TREES,
    Oracle,
    clear_prompt,
    decode_plainly,
    random_prompt,
    tiny,
)

cuda_only = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@cache
def model_on(device: str, family: str = "llama", dtype: torch.dtype = torch.float32):
    """Heads of 64 channels, which the kernels have; a copy, so that others keep theirs."""
    sizes = {"hidden_size": 256} if family != "qwen3" else {}
    return copy.deepcopy(tiny(family, **sizes)).to(device, dtype)


def make(rng: random.Random, device: str, family: str = "llama", count: int = 3, **options):
    model = model_on(device, family)
    low, high = options.pop("lengths", (3, 40))
    drawn = [clear_prompt(model, rng, low, high) for _ in range(count)]
    prompts = [prompt for prompt, _ in drawn]
    truths = {tuple(prompt): truth for prompt, truth in drawn}
    seed = rng.randrange(1 << 30)

    def generator(**more: object) -> Generator:
        drafter = Oracle(truths, random.Random(seed), feature_layers=(0, 2))
        return Generator(model, drafter=drafter, **(options | more))

    return generator, prompts, [truths[tuple(p)] for p in prompts]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("tree", TREES)
def test_fixed_steps_give_the_tokens_of_plain_decoding(device: str, family: str, tree: str) -> None:
    generator, prompts, truths = make(seeded(), device, family)
    fixed, free = generator(cuda_graphs=True), generator(cuda_graphs=False)
    for made in (fixed, free):
        for prompt, truth in zip(prompts, truths, strict=True):
            assert made.generate(prompt, 40, tree=TREES[tree]).token_ids == truth[:40]
        batch = made.generate(prompts, 40, tree=TREES[tree])
        assert batch.token_ids == [truth[:40] for truth in truths]
        passes, eager = batch.stats.graph_replays, batch.stats.eager_passes
        if made is free:
            assert passes == 0
            assert not eager
        elif device == "cuda":
            assert passes > eager.total() > 0
            assert set(eager) == {"first"}
        else:
            assert (passes, set(eager)) == (0, {"cpu"})


@pytest.mark.parametrize("device", DEVICES)
def test_captured_views_are_those_of_the_step(device: str) -> None:
    """Lossless tokens stand only if every replay sees its own views, tails and choices."""
    rng = seeded()
    generator, prompts, truths = make(
        rng, device, lengths=(70, 120), specpv=configured("lossless"), count=2, pace=False
    )
    tree = TreeConfig(rows=8, depth=4, top_k=2)
    for graphs in (True, False):
        made = generator(cuda_graphs=graphs)
        for _ in range(2):  # the second call finds the first one's graphs
            result = made.generate(prompts[0], 24, tree=tree)
            assert result.token_ids == truths[0][:24]
            assert result.stats.step_kinds["partial"] > 0
        batch = made.generate(prompts, 30, tree=tree)
        assert batch.token_ids == [truth[:30] for truth in truths]
        if device == "cuda" and graphs:
            assert result.stats.graph_replays > result.stats.eager_passes.total()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["rectify", "refresh"])
def test_replays_do_what_the_same_steps_do_uncaptured(
    device: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modes that drift: same shapes, same kernels, same bits, so the same drift."""
    rng = seeded()
    generator, prompts, _ = make(rng, device, lengths=(70, 120), specpv=configured(mode), count=2)
    tree = TreeConfig(rows=8, depth=4, top_k=2)
    replayed = [generator(cuda_graphs=True).generate(prompts, 40, tree=tree) for _ in range(2)]

    def refuse(self: StepGraphs, fixed, *more: object) -> None:
        fixed.refused = True

    monkeypatch.setattr(StepGraphs, "_capture", refuse)
    eager = generator(cuda_graphs=True).generate(prompts, 40, tree=tree)
    assert eager.stats.graph_replays == 0
    for result in replayed:
        assert result.token_ids == eager.token_ids
        assert result.stats.disagreed_tokens == eager.stats.disagreed_tokens
        assert result.stats.step_kinds == eager.stats.step_kinds


@cuda_only
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_our_kernels_replay_to_the_same_tokens(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = seeded()
    model = model_on("cuda", dtype=dtype)
    prompts = [random_prompt(rng, 70, 120) for _ in range(3)]
    truths = {tuple(p): decode_plainly(model, p, 48) for p in prompts}
    seed, tree = rng.randrange(1 << 30), TreeConfig(rows=8, depth=4, top_k=2)

    def run(**options: object):
        drafter = Oracle(truths, random.Random(seed), feature_layers=(1,))
        made = Generator(model, drafter=drafter, cuda_graphs=True, **options)
        return made.generate(prompts, 40, tree=tree)

    views = configured("rectify", specpv_block_size=16)
    replayed = [run(), run(specpv=views)]
    monkeypatch.setattr(
        StepGraphs, "_capture", lambda self, fixed, *more: setattr(fixed, "refused", True)
    )
    for result, eager in zip(replayed, (run(), run(specpv=views)), strict=True):
        assert result.stats.graph_replays > 0
        assert eager.stats.graph_replays == 0
        assert result.token_ids == eager.token_ids


@cuda_only
def test_what_cannot_be_captured_runs_all_the_same_and_is_counted() -> None:
    generator, prompts, truths = make(seeded(), "cuda", count=1)
    made = generator()
    handle = made.model.model.layers[1].register_forward_hook(
        lambda module, arguments, output: output[0].sum().item() and None
    )
    try:
        result = made.generate(prompts[0], 40, tree=TREES["chain"])
    finally:
        handle.remove()
    assert result.token_ids == truths[0][:40]
    assert result.stats.graph_replays == 0
    assert result.stats.eager_passes["refused"] > 0
    assert made._runner.cache.graphs.problem
    # And the device is as good as before.
    again = generator().generate(prompts[0], 40, tree=TREES["chain"])
    assert again.token_ids == truths[0][:40]
    assert again.stats.graph_replays > 0


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_may_have_fewer_drafts_than_a_step_of_its_shape(device: str) -> None:
    """22 trees of 14 rows: 286 drafts are staged, and steps of their shape have 384 rows."""
    generator, prompts, truths = make(seeded(), device, count=22)
    batch = generator(cuda_graphs=True).generate(prompts, 40, tree=TREES["tree"])
    assert batch.token_ids == [truth[:40] for truth in truths]
    assert batch.stats.graph_replays > 0 or device == "cpu"


def test_what_is_captured_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = torch.zeros(4, 16, 2, 8)
    interceptor = Interceptor(NworConfig(staging_rows=5, graph_rows=16))
    interceptor.bind_layer("0", keys, keys.clone())
    decided = []
    watched = SimpleNamespace(
        begin=lambda *plan, **how: decided.append(interceptor.begin(*plan, **how).stage),
        abort=interceptor.abort,
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(pool=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    graphs = StepGraphs(torch.device("cpu"), [], watched, 5)
    for rows in (1, 2, 6, 7, 16):
        fixed = SimpleNamespace(step=SimpleNamespace(plans={}))
        graphs._capture(fixed, SimpleNamespace(rows=rows), lambda step: None)
    assert decided == [False, True, True, True, True]


@pytest.mark.parametrize("device", DEVICES)
def test_steps_of_many_rows_run_as_they_are(device: str) -> None:
    generator, prompts, truths = make(seeded(), device)
    tree = TreeConfig(rows=256, depth=40, top_k=6)
    batch = generator(cuda_graphs=True).generate(prompts, 40, tree=tree)
    assert batch.token_ids == [truth[:40] for truth in truths]
    assert batch.stats.eager_passes["rows"] > 0


@pytest.mark.parametrize("device", DEVICES)
def test_checked_steps_are_looked_at_one_by_one(device: str) -> None:
    generator, prompts, truths = make(seeded(), device)
    made = generator(cuda_graphs=True, check_contract=True)
    batch = made.generate(prompts, 24, tree=TREES["tree"])
    assert batch.token_ids == [truth[:24] for truth in truths]
    assert batch.stats.violations == []
    assert batch.stats.graph_replays == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("view", ["none", "partial", "mixed_partial", "compact", "mixed_compact"])
@pytest.mark.parametrize("mask", ["causal", "tree", "random"])
def test_float32_attention_is_verify_attention(device: str, view: str, mask: str) -> None:
    rng = seeded()
    for _ in range(4):
        shape = Shape(
            rows=[rng.randrange(1, 9) for _ in range(3)],
            prefix=[rng.randrange(0, 90) for _ in range(3)],
            mask=mask,
            view=view,
            softcap=rng.choice([0.0, 3.0]),
            window=rng.choice([0, 20]) if (view, mask) == ("none", "causal") else 0,
        )
        step = make_step(shape, rng.randrange(1 << 30), device)
        prefix = step.arguments["prefix_lens"].tolist()
        places = [p + i for p, rows in zip(prefix, shape.rows, strict=True) for i in range(rows)]
        got = float32_attention(
            **step.arguments,
            tree_mask=step.tree_mask,
            scale=step.scale,
            positions=torch.tensor(places, device=device),
            max_rows=max(shape.rows) + rng.randrange(2),
            **step.options,
        )
        wanted, sums = step.reference()
        sees = torch.from_numpy(sums).isfinite()  # what a row gives that sees nothing is its own
        error = (got.double().cpu() - torch.from_numpy(wanted)).abs().amax(-1)
        assert error[sees].max() < 1e-5, shape


def test_a_table_that_grows_is_the_table_built_anew() -> None:
    rng = seeded()
    allocator = SlotAllocator(512, 4)
    tables = _BlockTables(allocator, torch.device("cpu"))
    keys = [1, 2, 3]
    for key in keys:
        allocator.extend(key, rng.randrange(1, 40))
    for turn in range(300):
        key = rng.choice(keys)
        what = rng.random()
        if what < 0.6:
            allocator.extend(key, rng.randrange(1, 9))
        elif what < 0.85 or turn < 10:
            length = rng.randrange(max(1, allocator.length(key) - 20), allocator.length(key) + 1)
            allocator.truncate(key, length)
            tables.forget_from(key, length // 4)
        else:
            old, key = key, max(keys) + 1
            allocator.fork(old, key, rng.randrange(1, allocator.length(old) + 1))
            keys = [key if one == old else one for one in keys]
            if rng.random() < 0.5:
                allocator.free(old)
        while allocator.stats()["free_slots"] < 100:
            longest = max(keys, key=allocator.length)
            allocator.truncate(longest, 1)
            tables.forget_from(longest, 0)
        asked = [None if rng.random() < 0.05 else one for one in keys]
        table = tables.of(asked)
        for row, one in enumerate(asked):
            if one is not None:
                pages = allocator.pages(one)
                assert table[row, : len(pages)].tolist() == pages
