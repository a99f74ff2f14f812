"""The commit kernel on CUDA: accepted rows and nothing else, float8, graphs, random rounds."""

from __future__ import annotations

import random

import pytest
import torch

import nwor_specpv
from nwor_specpv import COMMIT_ERRORS
from tests.python.kv_interceptor.cuda_caches import (
    CHAIN_ROWS,
    DEVICE,
    FP8,
    LAYOUTS,
    SEED,
    SHAPES,
    Batch,
    Caches,
    apply,
    check_ok,
    commit,
    finite_rows,
    generator_of,
    make_batch,
    make_status,
    random_rows,
    staged_rows,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_commit_writes_accepted_rows_and_nothing_else(layout, shape):
    generator = generator_of(1)
    heads, dim = shape
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        caches = Caches(3, 12, 16, heads, dim, dtype, layout, generator)
        batch = make_batch(6, 5, caches.num_slots, generator, tree=True)
        staged = staged_rows(3, batch.parents.numel(), heads, dim, dtype, generator)
        status = make_status()
        commit([t.to(DEVICE) for t in staged], caches, batch, status)
        tokens = apply(caches, staged, batch)
        check_ok(status, tokens)
        caches.check(f"{dtype}")


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_commit_of_caches_at_any_alignment(offset):
    generator = generator_of(2)
    caches = Caches(2, 5, 24, 4, 64, torch.bfloat16, "kv_first", generator, offset=offset)
    batch = make_batch(3, 4, caches.num_slots, generator)
    staged = staged_rows(2, 3 * 7, 4, 64, torch.bfloat16, generator)
    status = make_status()
    commit([t.to(DEVICE) for t in staged], caches, batch, status)
    check_ok(status, apply(caches, staged, batch))
    caches.check()


def test_commit_of_strided_staging_with_different_key_and_value_strides():
    generator = generator_of(3)
    caches = Caches(4, 9, 8, 2, 128, torch.bfloat16, "kv_second", generator)
    batch = make_batch(4, 3, caches.num_slots, generator, full=True)
    wide = random_rows((4, 24, 3, 2, 128), torch.bfloat16, generator).to(DEVICE)
    by_head = random_rows((4, 2, 24, 128), torch.bfloat16, generator).to(DEVICE)
    staged = (wide[:, :, 1], by_head.transpose(1, 2))
    status = make_status()
    commit(staged, caches, batch, status)
    check_ok(status, apply(caches, [t.cpu() for t in staged], batch))
    caches.check()


def test_commit_of_more_layers_than_the_usual_table_holds():
    generator = generator_of(4)
    caches = Caches(90, 4, 16, 2, 64, torch.float16, "packed", generator)
    batch = make_batch(2, 4, caches.num_slots, generator, full=True)
    staged = staged_rows(90, 14, 2, 64, torch.float16, generator)
    status = make_status()
    commit([t.to(DEVICE) for t in staged], caches, batch, status)
    check_ok(status, apply(caches, staged, batch))
    caches.check()


def test_commit_of_a_thousand_requests():
    generator = generator_of(5)
    caches = Caches(2, 520, 16, 2, 64, torch.bfloat16, "packed", generator)
    staged = staged_rows(2, 1024 * 10, 2, 64, torch.bfloat16, generator)
    on_device = [t.to(DEVICE) for t in staged]
    for full in (False, True):
        batch = make_batch(1024, 7, caches.num_slots, generator, full=full)
        status = make_status()
        commit(on_device, caches, batch, status)
        check_ok(status, apply(caches, staged, batch))
        caches.check(f"full={full}")


@pytest.mark.parametrize("sizes", [(0, 4), (3, 0), (3, 4)], ids=str)
def test_commit_of_nothing_writes_the_status_only(sizes):
    generator = generator_of(6)
    caches = Caches(2, 4, 16, 2, 64, torch.bfloat16, "kv_first", generator)
    requests, depth = sizes
    batch = Batch(
        torch.full((requests, depth), -1, dtype=torch.int32),
        torch.zeros(requests, dtype=torch.int32),
        torch.full((requests, depth), -1, dtype=torch.int64),
    )
    staged = staged_rows(2, 8, 2, 64, torch.bfloat16, generator)
    status = make_status()
    commit([t.to(DEVICE) for t in staged], caches, batch, status)
    check_ok(status, 0)
    caches.check()


def test_commit_beyond_four_gigabytes():
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free device memory")
    heads, dim, page_size = 8, 128, 16
    pages = 5 * 2**30 // (heads * dim * page_size * 2) + 1  # 5 GiB, 2.7e9 elements
    key, value = (
        torch.zeros(pages, page_size, heads, dim, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"
    )
    staged = [torch.ones(1, 2, heads, dim, dtype=torch.bfloat16, device=DEVICE) for _ in "kv"]
    last = pages * page_size - 1
    status = make_status()
    nwor_specpv.commit(
        *staged,
        [key],
        [value],
        torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE),
        torch.tensor([2], dtype=torch.int32, device=DEVICE),
        torch.tensor([[last, last - page_size]], device=DEVICE),
        status,
    )
    check_ok(status, 2)
    for cache in (key, value):
        assert cache.view(-1, heads, dim)[last].eq(1).all()
        assert cache.view(-1, heads, dim)[last - page_size].eq(1).all()
        assert sum(part.count_nonzero().item() for part in cache.split(4096)) == 2 * heads * dim


# ---- float8 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [False, True], ids=["per_tensor", "per_head"])
@pytest.mark.parametrize("dim", [64, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_float8_bytes_equal_those_of_the_cpu(dtype, dim, per_head):
    generator = generator_of(10)
    heads = 4
    caches = Caches(2, 6, 16, heads, dim, FP8, "packed", generator)
    batch = make_batch(3, 4, caches.num_slots, generator, full=True)
    staged = staged_rows(2, 3 * CHAIN_ROWS, heads, dim, dtype, generator, rows=finite_rows)
    scales = [torch.rand(heads if per_head else 1, generator=generator) + 0.01 for _ in range(4)]
    status = make_status()
    commit(
        [t.to(DEVICE) for t in staged],
        caches,
        batch,
        status,
        k_scales=[scale.to(DEVICE) for scale in scales[:2]],
        v_scales=[scale.to(DEVICE) for scale in scales[2:]],
    )
    check_ok(status, 12)
    views = caches.host_views()
    nwor_specpv.commit(
        *staged,
        [key for key, _ in views],
        [value for _, value in views],
        batch.path,
        batch.counts,
        batch.slots,
        torch.zeros(8, dtype=torch.int64),
        None,
        scales[:2],
        scales[2:],
    )
    caches.check("commit")

    # The direct write of the same rows gives the same bytes.
    direct = Caches(2, 6, 16, heads, dim, FP8, "packed", generator_of(10))
    slots = batch.slots.flatten().to(DEVICE)
    order = batch.path.flatten().long()
    none = torch.full((12,), -1, dtype=torch.int32, device=DEVICE)
    for layer in range(2):
        rows = [t[layer, order].to(DEVICE) for t in staged]
        nwor_specpv.write_kv(
            *rows,
            direct.key_views()[layer],
            direct.value_views()[layer],
            slots,
            none,
            *(torch.empty_like(t[:1]) for t in rows),
            scales[layer].to(DEVICE),
            scales[2 + layer].to(DEVICE),
        )
    direct.host = caches.host
    direct.check("direct write")


# ---- graphs, streams, random rounds -------------------------------------------------------------


def test_graph_replays_with_changed_paths_counts_and_slots():
    generator = generator_of(15)
    layers, requests, depth, heads, dim = 4, 5, 4, 2, 64
    rows = requests * CHAIN_ROWS
    caches = Caches(layers, 8, 16, heads, dim, torch.bfloat16, "packed", generator)
    keys, values = caches.key_views(), caches.value_views()
    source = torch.zeros(2, layers, rows, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    staged = torch.zeros_like(source)
    held = make_batch(requests, depth, caches.num_slots, generator).to(DEVICE)
    status = make_status()
    skip = torch.full((rows,), -1, device=DEVICE)
    stage_rows = torch.arange(rows, dtype=torch.int32, device=DEVICE)

    def step():
        for layer in range(layers):
            nwor_specpv.write_kv(
                source[0, layer],
                source[1, layer],
                keys[layer],
                values[layer],
                skip,
                stage_rows,
                staged[0, layer],
                staged[1, layer],
                exclusive=True,
            )
        nwor_specpv.commit(
            staged[0], staged[1], keys, values, held.path, held.counts, held.slots, status
        )

    held.counts.zero_()  # the warm-up must not change the caches
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(12):
        fresh = random_rows(tuple(source.shape), torch.bfloat16, generator)
        source.copy_(fresh)
        batch = make_batch(requests, depth, caches.num_slots, generator, full=turn % 2 == 0)
        broken = turn % 4 == 2
        if broken:
            batch.slots[4, 3] = batch.slots[0, 0]
        held.path.copy_(batch.path)
        held.counts.copy_(batch.counts)
        held.slots.copy_(batch.slots)
        graph.replay()
        if broken:
            code = COMMIT_ERRORS.index("duplicate_slot")
            assert status.tolist()[:3] == [code, 4, 3]
        else:
            check_ok(status, apply(caches, fresh, batch))
        caches.check(f"turn {turn}")


def test_commits_on_two_streams_do_not_disturb_each_other():
    generator = generator_of(16)
    runs = []
    for _ in range(2):
        caches = Caches(3, 64, 16, 4, 128, torch.bfloat16, "kv_first", generator)
        staged = staged_rows(3, 40 * CHAIN_ROWS, 4, 128, torch.bfloat16, generator)
        batch = make_batch(40, 4, caches.num_slots, generator)
        runs.append((torch.cuda.Stream(), caches, staged, [t.to(DEVICE) for t in staged], batch))
    torch.cuda.synchronize()
    states = [make_status() for _ in runs]
    torch.cuda.synchronize()
    for _ in range(20):
        for (stream, caches, _, on_device, batch), status in zip(runs, states, strict=True):
            with torch.cuda.stream(stream):
                commit(on_device, caches, batch, status)
    torch.cuda.synchronize()
    for (_, caches, staged, _, batch), status in zip(runs, states, strict=True):
        check_ok(status, apply(caches, staged, batch))
        caches.check()


def test_random_rounds_equal_the_model():
    print(f"seed={SEED}")
    chooser = random.Random(SEED)
    generator = generator_of(SEED)
    for turn in range(150):
        heads, dim = chooser.choice(SHAPES[:6])
        dtype = chooser.choice([torch.bfloat16, torch.float16, torch.float32])
        page_size = chooser.choice([1, 8, 16, 24, 32])
        layers, requests, depth = (chooser.randint(1, most) for most in (6, 12, 9))
        pages = requests * depth // page_size + chooser.randint(1, 9)
        layout = chooser.choice(LAYOUTS)
        caches = Caches(layers, pages, page_size, heads, dim, dtype, layout, generator)
        tree = chooser.random() < 0.5
        batch = make_batch(requests, depth, caches.num_slots, generator, tree=tree)
        staged = staged_rows(layers, requests * (depth + 3), heads, dim, dtype, generator)
        label = "ok"
        accepted = [(b, i) for b in range(requests) for i in range(batch.counts[b].item())]
        if accepted and chooser.random() < 0.4:
            b, i = chooser.choice(accepted)
            label = chooser.choice(["count_range", "path_range", "slot_range", "duplicate_slot"])
            if label == "count_range":
                batch.counts[b] = chooser.choice([-1, depth + 1, 2**31 - 1])
            elif label == "path_range":
                batch.path[b, i] = chooser.choice([-1, requests * (depth + 3), -(2**31)])
            elif label == "slot_range":
                batch.slots[b, i] = chooser.choice([-1, caches.num_slots, 2**45, -(2**45)])
            elif (b, i) != accepted[0]:
                batch.slots[b, i] = batch.slots[accepted[0]]
            else:
                label = "ok"
        status = make_status()
        commit([t.to(DEVICE) for t in staged], caches, batch, status)
        what = f"seed={SEED} turn={turn} {layout} {dtype} {label}"
        if label == "ok":
            assert status.tolist() == [0, 0, 0, 0, apply(caches, staged, batch), 0, 0, 0], what
        else:
            assert COMMIT_ERRORS[status[0].item()] == label, what
            assert status[1].item() == b, what
            assert status[4].item() == 0, what
        caches.check(what)
