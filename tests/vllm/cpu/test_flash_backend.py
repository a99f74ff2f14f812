"""Our CUDA backend on the CPU, over a FlashAttention-3 written in torch: the Python of every step.

How batches are split, what FlashAttention is asked for, who writes which row and what is committed
do not need a GPU; kernels and replayed graphs do (test_cuda.py).
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv import Metrics, NworError
from nwor_specpv.models import stories
from nwor_specpv.vllm import plugin
from nwor_specpv.vllm.specpv.rules import DRAFTER
from support.configs import HYBRID
from support.engines import (
    DIRECT,
    NGRAM,
    STAGED,
    STOCK,
    check_drafting,
    drive,
    greedy,
    own_engine,
    start,
    story_prompts,
)
from support.engines import stats as own_stats
from support.flash_double import FLASH_ATTN, NUM_SMS, Calls, flash_attention
from support.heads import story_head
from support.installed import ADAPTER, PAGE
from support.metric_counts import full_steps_since, grown
from support.small_views import SMALL_VIEW, prompts

pytestmark = pytest.mark.serves("FlashAttention backend, on a double", "V1")

ARRIVALS = [0, 1, 3, 3, 7, 20]  # prefills stand behind requests that verify
LAYERS = 5
SIDES = {
    "checked": STAGED,
    "deferred": {"strict": True},  # without the checker attention does the write
    "own_attention": {"strict": True, "attention_route": "cpu"},
}


def run(nwor: dict, **options: object) -> tuple[dict, dict]:
    """Tokens by request and the caches by layer, while all are at work: no block is used twice."""
    model = {"model": str(stories(64)), "skip_tokenizer_init": True}  # heads of a size we have
    llm = start(nwor, max_num_batched_tokens=48, **(model | options))
    story = drive(llm, story_prompts(6), greedy(200), arrivals=ARRIVALS, max_steps=45)
    assert not story.finished
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return story.tokens, {name: layer.kv_cache.clone() for name, layer in layers.items()}


@pytest.fixture(scope="module")
def stock() -> tuple[dict, dict]:
    """Of vLLM's own FlashAttention backend."""
    with flash_attention(FLASH_ATTN) as calls:
        found = run(STOCK)
        assert calls.attended
    return found


@pytest.mark.parametrize("side", SIDES)
def test_tokens_and_committed_rows_are_those_of_vllms_backend(side: str, stock: tuple) -> None:
    wanted, theirs = stock
    with flash_attention(plugin.CUDA_BACKEND) as calls:
        tokens, written = run(SIDES[side])
    assert tokens == wanted
    stats = check_books()
    check_calls(calls, verify_steps=stats["stage_operations"] // LAYERS, side=side)
    check_caches(written, theirs, stats["rejected_tokens"])


def test_a_block_that_is_hit_in_the_step_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests of the step have as many rows as verify ones, so layers might write late."""
    text = [3 + 7 * place % 500 for place in range(3 * PAGE)]
    prompts = [text[:PAGE], text[: 2 * PAGE], text]
    asked: list[bool]  # by the runner, which picks full graphs for uniform batches

    def seen(llm: Any) -> dict:
        worker = llm.llm_engine.model_executor.driver_worker
        dispatcher = worker.worker.model_runner.cudagraph_dispatcher
        dispatch = dispatcher.dispatch

        def note(*args: Any, **told: Any) -> Any:
            asked.append(told["uniform_decode"])
            return dispatch(*args, **told)

        monkeypatch.setattr(dispatcher, "dispatch", note)
        story = drive(llm, prompts, greedy(24), arrivals=[0, 30, 30])
        assert (story.cached["1"], story.cached["2"]) == (PAGE, 2 * PAGE)
        return story.tokens

    found = []
    for backend, nwor in ((FLASH_ATTN, STOCK), (plugin.CUDA_BACKEND, {"strict": True})):
        asked = []
        with flash_attention(backend):
            model = {"model": str(stories(64)), "skip_tokenizer_init": True}
            speculation = NGRAM | {"num_speculative_tokens": PAGE - 1}
            found.append((seen(start(nwor, speculation=speculation, **model)), asked))
    (wanted, theirs), (tokens, ours) = found
    assert tokens == wanted
    assert [pair for pair in zip(theirs, ours, strict=True) if len(set(pair)) > 1] == [
        (True, False)
    ]


def test_plans_of_graphs_lie_in_one_place_that_is_not_the_caches() -> None:
    """What vLLM's builder has is the caches' memory, and gone while vLLM sleeps."""
    from nwor_specpv.vllm.backend.prefix_planner import PrefixPlanner

    theirs = torch.zeros(9, dtype=torch.int32)
    builder = SimpleNamespace(
        use_full_cuda_graph=True,
        aot_schedule=True,
        kv_cache_dtype=torch.bfloat16,
        scheduler_metadata=theirs,
    )
    with flash_attention(plugin.CUDA_BACKEND):
        planner = PrefixPlanner(builder, "auto", theirs.device)
    assert not any(isinstance(value, torch.Tensor) for value in vars(planner).values())
    first = planner._placed(torch.full((7,), 5, dtype=torch.int32))
    second = planner._placed(torch.full((3,), 6, dtype=torch.int32))
    assert first.data_ptr() == second.data_ptr() != theirs.data_ptr()
    assert first.tolist() == [6, 6, 6, 0, 0, 0, 0]


def check_books() -> dict:
    stats = own_stats()
    assert stats["staged_tokens"] == stats["committed_tokens"] + stats["rejected_tokens"]
    assert stats["committed_tokens"] > 0
    assert stats["fallbacks"] == {}
    assert own_engine().violations == []
    return stats


def check_calls(calls: Calls, *, verify_steps: int, side: str) -> None:
    """Prefixes alone for verifying rows, once a layer and step; rows behind as vLLM asks."""
    prefixes = [call for call in calls.attended if call["causal"] is False]
    assert len(prefixes) == (0 if side == "own_attention" else LAYERS * verify_steps)
    for call in prefixes:
        assert call["return_softmax_lse"]
        lens = call["cu_seqlens_q"].diff()
        assert (call["seqused_k"] > 0).all()
        assert call["q"].shape[0] == int(lens.sum())
    behind = [call for call in calls.attended if call["causal"] is True]
    assert behind
    schedules = [plan for plan in calls.planned if plan["causal"] is False]
    assert len(schedules) == len(prefixes) // LAYERS


def check_caches(ours: dict, theirs: dict, most_rejected: int) -> None:
    """Rows that we wrote are what vLLM wrote there; the rest are rejected, the same everywhere.

    The first layer bit for bit, codes in every layer. Later layers come from attention that is
    summed in another order.
    """
    assert ours.keys() == theirs.keys()
    left_out = set()
    for number, name in enumerate(ours):
        wrote, wanted = (c[name].transpose(1, 2).flatten(0, 1) for c in (ours, theirs))
        empty = (wrote == 0).all(dim=(1, 2))
        if number == 0 or wrote.dtype == torch.uint8:
            assert torch.equal(wrote[~empty], wanted[~empty])
        else:
            torch.testing.assert_close(wrote[~empty], wanted[~empty], rtol=1e-4, atol=1e-4)
        rejected = empty & (wanted != 0).any(dim=(1, 2))
        left_out.add(tuple(rejected.nonzero().flatten().tolist()))
    (slots,) = left_out
    assert 0 < len(slots) <= most_rejected


@pytest.mark.parametrize(
    ("head_size", "ours"), [(64, True), pytest.param(32, False, marks=pytest.mark.slow)]
)
def test_windows_are_ours_and_full_layers_flash_attentions(
    tmp_path: Path, head_size: int, ours: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Two cache groups in one step, softcaps, made-up weights.

    Where our attention has no kernel for the head size, windows are left to vLLM at start.
    """
    (tmp_path / "config.json").write_text(json.dumps(HYBRID | {"head_dim": head_size}))
    model = {"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True}
    found = []
    for backend, nwor in ((FLASH_ATTN, STOCK), (plugin.CUDA_BACKEND, {"strict": ours})):
        with flash_attention(backend) as calls, caplog.at_level(logging.WARNING, "nwor_specpv"):
            found.append(run(nwor, **model)[0])
    assert found[0] == found[1]
    assert check_books()["groups"] == (2 if ours else 1)
    left = "leaves a layer to vLLM: it has a head size of 32, and our attention has 64, 80"
    assert (left in caplog.text) is not ours
    assert len(own_engine().own_layers) == (4 if ours else 2)
    impls = [layer.impl for layer in own_engine().layers.values()]
    assert [getattr(impl, "flash_prefix", False) for impl in impls] == [False, True] * 2
    assert {call["softcap"] for call in calls.attended if not call["causal"]} == {50.0}


def test_a_float8_cache_is_staged_and_quantised_by_the_commit() -> None:
    """The same run staged and written directly: the same tokens, the same codes."""
    runs = []
    with flash_attention(plugin.CUDA_BACKEND) as calls:
        for nwor in (DIRECT, STAGED):
            runs.append(run(nwor, kv_cache_dtype="fp8"))
    stats = check_books()
    assert {layer.kv_cache.dtype for layer in own_engine().layers.values()} == {torch.uint8}
    assert {call["k"].dtype for call in calls.attended} == {torch.float8_e4m3fn}
    (direct_tokens, direct), (tokens, staged) = runs
    assert tokens == direct_tokens
    check_caches(staged, direct, stats["rejected_tokens"])


@pytest.mark.parametrize("mode", ["lossless", "refresh"])
def test_views_of_a_float8_cache(mode: str) -> None:
    """Passes, summaries and tails over codes. Tokens depend on what was drafted, by rounding: the
    verify step reads drafts before they are quantised."""
    model = {"model": str(stories(64)), "skip_tokenizer_init": True, "kv_cache_dtype": "fp8"}
    speculation = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 8}
    before, refresh = Metrics().snapshot(), mode == "refresh"
    views = SMALL_VIEW | {"specpv_mode": mode, "specpv_draft_passes": 0 if refresh else 3}
    with flash_attention(plugin.CUDA_BACKEND):
        llm = start(
            views,
            speculation=NGRAM if refresh else speculation,
            enable_prefix_caching=False,
            **model,
        )
        drive(llm, prompts(), greedy(32), arrivals=[0, 0, 3, 3, 9, 12])
        check_books()
        assert {layer.kv_cache.dtype for layer in own_engine().layers.values()} == {torch.uint8}
    if refresh:
        assert grown(before, "specpv_partial_steps_total") > 0
        return
    check_drafting(before)
    drafted = grown(before, "specpv_drafted_tokens_total")
    assert 0.5 * drafted < grown(before, "specpv_confirmed_tokens_total") <= drafted


def test_layers_that_are_not_quantised_have_plans_of_their_own() -> None:
    """FlashAttention-3 cuts its work by the size of a number."""
    model = {"model": str(stories(64)), "skip_tokenizer_init": True}
    with flash_attention(plugin.CUDA_BACKEND) as calls:
        skipped = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}
        drive(start({"strict": True}, **(model | skipped)), story_prompts(3), greedy(20))
    kinds = [plan["qkv_dtype"] for plan in calls.planned if plan["causal"] is False]
    assert kinds.count(torch.float32) == kinds.count(torch.float8_e4m3fn) > 0


def test_the_target_drafts_over_views() -> None:
    """Mode lossless on model runner V1: verifying requests of many lengths, passes in between."""
    model = {"model": str(stories(64)), "skip_tokenizer_init": True}
    with flash_attention(FLASH_ATTN):
        plain = start(STOCK, speculation=None, **model)
        wanted = drive(plain, prompts(), greedy(32)).tokens
    speculation = {"method": "custom_class", "model": DRAFTER, "num_speculative_tokens": 8}
    before = Metrics().snapshot()
    with flash_attention(plugin.CUDA_BACKEND) as calls:
        llm = start(SMALL_VIEW | {"specpv_draft_passes": 3}, speculation=speculation, **model)
        found = drive(llm, prompts(), greedy(32), arrivals=[0, 0, 3, 3, 9, 12]).tokens
    assert found == wanted
    check_drafting(before)
    check_books()
    rows = {tuple(c["cu_seqlens_q"].diff().tolist()) for c in calls.attended if not c["causal"]}
    assert any(len(set(lens)) > 1 for lens in rows)
    now = Metrics().snapshot()
    drafted, confirmed = (
        now[f"specpv_{name}_tokens_total"] - before[f"specpv_{name}_tokens_total"]
        for name in ("drafted", "confirmed")
    )
    assert confirmed > 0.5 * drafted > 0


@pytest.mark.parametrize("mode", [pytest.param("refresh", marks=pytest.mark.slow), "plain"])
def test_heads_see_as_much_as_a_view_holds(tmp_path: Path, mode: str) -> None:
    """In mode refresh; the target's layers, whose metadata they share, are left alone."""
    model = {"model": str(stories(64)), "skip_tokenizer_init": True, "enable_prefix_caching": False}
    head = story_head(tmp_path, torch.float32)
    nwor = SMALL_VIEW | {"specpv_mode": "refresh"} if mode == "refresh" else STAGED
    with flash_attention(plugin.CUDA_BACKEND) as calls:
        llm = start(nwor, speculation=head, **model)
        drive(llm, prompts(), greedy(24), arrivals=[0, 0, 3, 3, 9, 12])
    check_books()
    layers = own_engine().layers
    (cache,) = (
        layer.kv_cache for name, layer in layers.items() if name not in own_engine().own_layers
    )
    by_head = [call for call in calls.attended if call["k"].data_ptr() == cache.data_ptr()]
    others = [call for call in calls.attended if call["k"].data_ptr() != cache.data_ptr()]
    assert {tuple(call.get("window_size") or (-1, -1)) for call in others} <= {(-1, -1)}
    assert len(by_head) > 24
    latest = (own_engine().refresh.view_tokens - 1, 0) if mode == "refresh" else (-1, -1)
    assert {tuple(call["window_size"]) for call in by_head} == {latest}


def test_schedules_of_a_heads_own_are_of_its_window() -> None:
    """Model runner V2 has a builder for the head alone."""
    from nwor_specpv.vllm.backend.flash_head import HeadFlashImpl, head_window, of_window

    impl = HeadFlashImpl.__new__(HeadFlashImpl)
    impl.latest = (95, 0)
    made = SimpleNamespace(scheduler_metadata=torch.zeros(1))
    assert impl.window_of(made) == (-1, -1), "the schedule would not fit the window"
    assert impl.window_of(of_window(made, (40, 0))) == (40, 0)
    made.scheduler_metadata = None
    assert impl.window_of(made) == (95, 0)

    def layers(**latest: tuple[int, int] | None) -> SimpleNamespace:
        impls = {
            name: SimpleNamespace(impl=SimpleNamespace(latest=window) if window else None)
            for name, window in latest.items()
        }
        return SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=impls))

    config = layers(target=None, head=(95, 0), second=(95, 0), other=(10, 0))
    assert head_window(config, ["head"]) == (95, 0)
    assert head_window(config, ["head", "second"]) == (95, 0)
    for names in (["target"], ["target", "head"], ["head", "other"]):
        assert head_window(config, names) is None, names


@pytest.mark.parametrize("backend", [plugin.CPU_BACKEND, plugin.CUDA_BACKEND], ids=["cpu", "cuda"])
def test_sizes_that_vllm_tries_are_no_steps(backend: str) -> None:
    """After graphs are captured it runs the model without metadata, on fewer rows than the last
    graph has; the step of that graph is still open."""
    from vllm.config import CUDAGraphMode

    with flash_attention(backend):
        llm = start(STAGED, model=str(stories(64)), skip_tokenizer_init=True)
        before = drive(llm, story_prompts(3), greedy(12)).tokens
        caches = {name: layer.kv_cache.clone() for name, layer in own_engine().layers.items()}
        own_engine().steps.begin(0, [9, 9], [8, 8], torch.arange(18))
        own_engine().runner._dummy_run(8, cudagraph_runtime_mode=CUDAGraphMode.NONE)
        for name, layer in own_engine().layers.items():
            assert torch.equal(layer.kv_cache, caches[name])
        assert drive(llm, story_prompts(3), greedy(12)).tokens == before
    assert own_stats()["fallbacks"] == {}
    assert own_engine().violations == []


# ---- requests behind those that verify ----


def test_requests_behind_take_what_is_theirs_along() -> None:
    """Every field of vLLM's metadata that has an entry for each request or row."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    with flash_attention(plugin.CUDA_BACKEND):
        from nwor_specpv.vllm.backend.flash_builder import behind

    lens, count = [5, 5, 7, 1], 2
    others = set(ADAPTER.of_requests) - {"seq_lens", "block_table_tensor", "is_prefilling"}
    arrays = {"encoder_seq_lens_cpu", "req_idx"}
    rows, requests = torch.arange(sum(lens)), torch.arange(len(lens))
    whole_batch = CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 5, 10, 17, 18]),
        query_start_loc_cpu=torch.tensor([0, 5, 10, 17, 18]),
        seq_lens=requests, num_reqs=4, num_actual_tokens=18, max_query_len=7, max_seq_len=99,
        block_table_tensor=requests[:, None], slot_mapping=rows, positions=rows,
        is_prefilling=requests > 1,
        mm_req_doc_ranges={0: [(0, 3)], 2: [(1, 4), (5, 6)], 3: []},
        **{name: requests.numpy() if name in arrays else requests for name in others},
    )  # fmt: skip
    whole_batch._num_computed_tokens_cache = requests  # as if somebody had asked for them
    whole_batch._token_to_req_indices_cache = rows
    found = dict(vars(behind(whole_batch, count, 10, 7)))
    for name in ("query_start_loc", "query_start_loc_cpu"):
        assert found.pop(name).tolist() == [0, 7, 8]
    for name in ("slot_mapping", "positions"):
        assert found.pop(name).tolist() == list(range(10, 18)), name
    assert found.pop("mm_req_doc_ranges") == {0: [(1, 4), (5, 6)], 1: []}
    assert found.pop("block_table_tensor").tolist() == [[2], [3]]
    assert found.pop("is_prefilling").tolist() == [True, True]
    numbers = {"num_reqs": 2, "num_actual_tokens": 8, "max_query_len": 7, "max_seq_len": 99}
    assert {name: found.pop(name) for name in numbers} == numbers
    assert found.pop("causal") is True
    fast_prefill = ("logits_indices_padded", "num_logits_indices", "max_logits_per_req")  # refused
    made_when_asked_for = ("_num_computed_tokens_cache", "_token_to_req_indices_cache")
    assert {found.pop(name, None) for name in (*fast_prefill, *made_when_asked_for)} == {None}
    for name, value in found.items():
        assert value.tolist() == [2, 3], name


def test_attention_that_is_not_causal_is_refused() -> None:
    with flash_attention(plugin.CUDA_BACKEND):
        llm = start({"strict": True})
        drive(llm, story_prompts(1), greedy(4))
        builder = graph_builder(llm)
        with pytest.raises(NworError, match="not causal"):
            builder.build(0, whole([5, 5], 64).replace(causal=False))


# ---- what graphs find ----


def common(lens: list[int], context: int) -> SimpleNamespace:
    """A batch in which each request has so many tokens before its rows; 0 rows: padding."""
    start = torch.tensor([0, *lens]).cumsum(0).int()
    seq = torch.tensor([context + n if n else 0 for n in lens], dtype=torch.int32)
    table = torch.zeros(len(lens), 4, dtype=torch.int32)
    return SimpleNamespace(
        query_start_loc=start, query_start_loc_cpu=start, seq_lens=seq, max_seq_len=int(seq.max()),
        seq_lens_cpu_upper_bound=seq.clone(), block_table_tensor=table,
    )  # fmt: skip


def graph_builder(llm: Any) -> Any:
    """A second builder of an engine that has run, as if its batches were in full graphs."""
    from vllm.config import CUDAGraphMode

    config = llm.llm_engine.vllm_config
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    config.compilation_config.max_cudagraph_capture_size = 240
    (group,) = (g for groups in own_engine().runner.attn_groups for g in groups)
    kind, layers = type(group.metadata_builders[0]), list(group.layer_names)
    return kind(group.kv_cache_spec, layers, config, torch.device("cpu"))


def test_schedules_of_graphs_keep_their_place() -> None:
    """A graph reads the plan where it was captured; nothing of a larger batch stands behind."""
    with flash_attention(plugin.CUDA_BACKEND) as calls:
        llm = start({"strict": True})
        drive(llm, story_prompts(1), greedy(4))
        builder = graph_builder(llm)
        places = set()
        for lens, finer in (([5] * 24, True), ([5] * 8, False), ([5, 5, 5, 0], False)):
            calls.planned.clear()
            batch = common(lens, 30720)
            part = builder._verify_part(batch, lens, sum(lens))
            schedule = builder._prefixes.plan(
                batch, part.prefix_lens, part.query_start, part.num_rows, part.max_rows
            )
            (plan,) = calls.planned
            assert plan["num_splits"] == schedule.max_splits == builder.max_num_splits > 1
            assert plan["sm_margin"] <= 0
            assert (plan["sm_margin"] < 0) is finer, NUM_SMS
            assert part.uniform
            assert part.prefix_lens.tolist()[:3] == [30720] * 3
            places.add((schedule.metadata.data_ptr(), part.prefix_lens.data_ptr()))
            buffer = schedule.metadata.untyped_storage()
            whole = torch.empty(0, dtype=torch.int32).set_(buffer)
            assert whole[: schedule.metadata.shape[0]].all()
            assert not whole[schedule.metadata.shape[0] :].any()
        assert len(places) == 1


DYNAMIC = NGRAM | {"num_speculative_tokens_per_batch_size": [(1, 2, 4), (3, 5, 2), (6, 8, 0)]}


def whole(lens: list[int], context: int) -> Any:
    """The same batch as vLLM tells of it; rows lie one behind the other in the cache."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    found = vars(common(lens, context))
    rows = sum(lens)
    return CommonAttentionMetadata(
        **found, num_reqs=len(lens), num_actual_tokens=rows, max_query_len=max(lens),
        slot_mapping=torch.arange(rows),
    )  # fmt: skip


def test_rows_of_every_graph_take_the_way_of_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """With numbers of drafts by batch size model runner V2 captures graphs for each of them, and
    replays them for prompt pieces of as many rows: all their requests must be planned."""
    with flash_attention(plugin.CUDA_BACKEND):
        llm = start({"strict": True}, speculation=DYNAMIC)
        drive(llm, story_prompts(1), greedy(4))
        builder = graph_builder(llm)
        for lens, drafts in (
            ([3, 3, 3], [2, 0, 0]),
            ([3, 3, 3], [0, 0, 0]),
            ([3, 3, 3, 0], [2, 0, 0, 0]),
            ([5, 5], [4, 0]),
        ):
            monkeypatch.setattr(own_engine(), "drafts", lambda *_, drafts=drafts: drafts)
            builder._prefix_lens.fill_(-1)
            made = builder.build(0, whole(lens, 64))
            assert made.rest is None, lens
            assert made.verify.num_rows == sum(lens)
            assert made.verify.prefix_lens.tolist()[:2] == [64, 64]
            assert made.verify.prefix_lens.shape[0] == len(lens)
        # Without drafts there is nothing to verify, in a capture and in a replay.
        monkeypatch.setattr(own_engine(), "drafts", lambda lens, _: [0] * len(lens))
        assert not hasattr(builder.build(0, whole([1, 1, 1], 64)), "verify")
        own_engine().steps.abort()


def test_vllm_captures_no_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)
    for speculation, captured in ((NGRAM, {5}), (DYNAMIC, {5, 3, 1})):
        with flash_attention(plugin.CUDA_BACKEND):
            config = start({"strict": True}, speculation=speculation).llm_engine.vllm_config
        compilation = config.compilation_config
        compilation.cudagraph_capture_sizes = [1, 2, 4, 8, 16, 24, 32, 40]
        compilation.max_cudagraph_capture_size = 40
        mode = CUDAGraphMode.FULL_DECODE_ONLY
        manager = cudagraph_utils.CudaGraphManager(config, torch.device("cpu"), mode, 5)
        graphs = manager._capture_descs[CUDAGraphMode.FULL]
        assert {graph.uniform_token_count for graph in graphs} == captured
        assert set(own_engine().uniform_rows) == captured - {1}


def test_plans_of_ragged_steps_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a plan takes megabytes, and steps outside of graphs have many shapes."""
    from nwor_specpv import _C

    buffers = []

    def plan(query: Any, *_: Any, plan: Any = None, **__: Any) -> torch.Tensor:
        plan = torch.empty(256 * query.shape[0], dtype=torch.uint8) if plan is None else plan
        assert plan.shape == (256 * query.shape[0],)
        buffers.append((plan.untyped_storage().data_ptr(), weakref.ref(plan)))
        return plan

    with flash_attention(plugin.CUDA_BACKEND):
        model = {"model": str(stories(64)), "skip_tokenizer_init": True}
        llm = start({"strict": True, "attention_route": "cpu"}, **model)
        drive(llm, story_prompts(1), greedy(4))
        builder = graph_builder(llm)
        monkeypatch.setattr(sys.modules[type(builder).__module__], "verify_plan", plan)
        size = lambda query, *_, **__: 256 * query.shape[0]  # noqa: E731
        monkeypatch.setattr(_C, "verify_plan_bytes", size)
        monkeypatch.setattr(own_engine(), "drafts", lambda lens, _: [n - 1 for n in lens])
        for first, second in itertools.product((5, 4, 3, 2, 1), (4, 3, 2)):
            builder.build(0, whole([first, second], 64))
        own_engine().steps.abort()
    assert len(buffers) == 15
    assert [place for place, buffer in buffers if buffer() is not None] == []
    assert len({place for place, _ in buffers}) == 1


# ---- mode refresh ----


def test_requests_behind_keep_their_views_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without drafts stand behind the ones that verify; they see their whole context."""
    from nwor_specpv.vllm.engine import Engine
    from nwor_specpv.vllm.specpv.refresh_requests import RefreshRequests

    forget, count_drafts = RefreshRequests._forget, Engine.drafts
    dropped, tokens = [], []

    def forgetting(self: Any, names: set[str]) -> None:
        before = set(self._known)
        forget(self, names)
        if gone := before - set(self._known):
            dropped.extend(gone & set(own_engine().runner.input_batch.req_ids))

    def drafts(self: Any, lens: list[int], common: Any) -> Any:
        """Asked for once a step. Before the first tokens nobody knows the requests' names."""
        if self.runner is not None:
            tokens.extend((common.seq_lens - torch.tensor(lens)).tolist())
        return count_drafts(self, lens, common)

    monkeypatch.setattr(RefreshRequests, "_forget", forgetting)
    monkeypatch.setattr(Engine, "drafts", drafts)
    model = {"model": str(stories(64)), "skip_tokenizer_init": True, "enable_prefix_caching": False}
    before = Metrics().snapshot()
    with flash_attention(plugin.CUDA_BACKEND):
        llm = start(SMALL_VIEW | {"specpv_mode": "refresh"}, max_num_batched_tokens=96, **model)
        drive(llm, prompts(), greedy(48), arrivals=[0, 0, 3, 9, 9, 20])
        views = own_engine().refresh.views
        drive(llm, [[1, 5]], greedy(1))  # nobody has drafts
    check_books()
    full, partial = full_steps_since(before), grown(before, "specpv_partial_steps_total")
    assert partial + sum(full.values()) == len(tokens)
    assert full["first"] == 4  # two requests are shorter than the view
    assert full["policy"] > 0
    assert partial > 50
    read, all_of_it = (grown(before, f"specpv_kv_bytes_{name}_total") for name in ("read", "full"))
    assert read < all_of_it == sum(tokens) * views.requests.bytes_per_token
    assert len(views.store._free) == views.store.max_requests
    assert dropped == []
