"""How the speculator of model runner V2 starts, and what it offers: without a GPU."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv.vllm.specpv.lengths import Lengths
from support.speculator_world import (
    BATCH,
    LIMIT,
    MAX_LEN,
    PAGE,
    ROWS,
    World,
    make,
    proposals_module,
    speculator_module,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("case", ["alone", "short", "lowered"])
def test_a_start_without_graphs_takes_memory(
    case: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No pass runs: speed is measured in service."""
    world = World([])
    spec = make(world, monkeypatch)
    monkeypatch.setattr(world, "forward", fail, raising=False)
    if case == "short":
        spec.vllm_config.model_config.max_model_len = spec.lengths.shortest
    if case == "lowered":  # by vLLM, which tells its runner and not us
        spec.vllm_config.model_config.max_model_len -= 40
    with caplog.at_level(logging.INFO, "nwor_specpv"):
        spec.start()
        loop = spec._loop
        spec.start()  # what is there stays
    assert spec._engine.draft_failures.latest == ""
    assert spec._loop is loop
    assert (loop is not None) == (case != "short")
    ours = [record for record in caplog.records if record.name == "nwor_specpv"]
    said = [record.getMessage().split()[1] for record in ours]
    assert said == ([] if case == "short" else ["views"])
    if case == "lowered":
        assert spec._loop.store.max_tokens == spec.max_model_len == MAX_LEN - 40


def fail(*_: Any) -> Any:
    raise RuntimeError("injected")


def test_a_start_that_fails_leaves_the_head_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from nwor_specpv import Metrics

    spec = make(World([]), monkeypatch)
    monkeypatch.setattr(spec, "_ready", fail)
    before = Metrics().snapshot()["specpv_draft_failures_total"].get("start", 0)
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        for _ in range(2):  # it is not tried again
            spec.start()
    said = "partial passes failed, so the head drafts alone until the next start"
    assert caplog.text.count(f"nwor_specpv: {said}: RuntimeError: injected") == 1
    assert Metrics().snapshot()["specpv_draft_failures_total"]["start"] == before + 1
    assert spec._engine.draft_failures.latest == "RuntimeError: injected"
    assert spec.lengths.given_up
    assert spec._loop is None  # nor is memory held for nobody


@pytest.mark.parametrize("tried", [True, False])
def test_caches_that_vllm_only_tries_have_no_views(
    tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It captures graphs on them to see how much memory those take."""
    spec = make(World([]), monkeypatch)
    captured: list[list[int]] = []
    monkeypatch.setattr(spec, "_capture_loop", captured.append)
    spec._engine.sizes_caches = tried
    spec._capture_passes([SimpleNamespace(num_reqs=4, uniform_token_count=ROWS)])
    assert captured == ([] if tried else [[4]])


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_graphs_of_all_lengths_are_offered(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own managers: full graphs for plain steps, for few drafts and for whole chains, single
    rows for the head."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    from nwor_specpv.vllm import registry
    from nwor_specpv.vllm.hooks import graph_lengths

    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    monkeypatch.setattr(cudagraph_utils, "is_breakable_cudagraph_enabled", lambda: False)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(cudagraph_utils, "current_platform", platform)
    spec = make(World([]), monkeypatch)
    speculative = SimpleNamespace(num_speculative_tokens_per_batch_size=None)
    speculative.uses_dynamic_speculative_decoding = lambda: (
        speculative.num_speculative_tokens_per_batch_size is not None
    )
    spec.speculative_config, spec.num_speculative_steps = speculative, LIMIT
    spec.vllm_config = SimpleNamespace(
        speculative_config=speculative,
        num_speculative_tokens=LIMIT,
        scheduler_config=SimpleNamespace(max_num_seqs=BATCH),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64, 96], max_cudagraph_capture_size=96
        ),
    )
    assert graph_lengths.install() is None
    engine = SimpleNamespace(draft_lengths=spec.lengths.drafts)
    monkeypatch.setattr(registry, "find_engine", lambda _: engine)
    spec.init_cudagraph_manager(CUDAGraphMode[mode])
    assert not speculative.uses_dynamic_speculative_decoding(), "vLLM's scheduler would take it"
    full = spec.prefill_cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
    by_rows = {1 + drafts: set() for drafts in spec.lengths.drafts}
    assert set(by_rows) >= {1, ROWS, 1 + LIMIT}
    for desc in full:
        by_rows[desc.uniform_token_count].add(desc.num_reqs)
    assert by_rows[1 + LIMIT] >= {1, 2, 4, 6}
    assert by_rows[ROWS] >= {1, 2, 4}
    assert by_rows[1] >= {1, 2, 4}
    single = spec.decode_cudagraph_manager._capture_descs[CUDAGraphMode.FULL]
    assert {desc.uniform_token_count for desc in single} == {1}
    # Every batch of either kind finds a graph, the smallest that holds it.
    manager = spec.prefill_cudagraph_manager
    manager._graphs_captured = True
    for rows, batches in by_rows.items():
        for count in range(1, max(batches) + 1):
            desc = manager.dispatch(count, count * rows, rows, 0)
            assert desc.cg_mode == CUDAGraphMode.FULL, (rows, count)
            assert desc.uniform_token_count == rows
            assert desc.num_reqs == min(n for n in batches if n >= count)
    mixed = manager.dispatch(3, 3 * ROWS + 1, None, 0).cg_mode
    assert mixed == (CUDAGraphMode.NONE if mode == "FULL_DECODE_ONLY" else CUDAGraphMode.PIECEWISE)


@pytest.mark.parametrize("ranges", [None, [(1, 4, LIMIT), (5, BATCH, 2)]])
def test_ranges_of_the_users_are_refused(
    ranges: list | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nwor_specpv.config import load_config
    from nwor_specpv.errors import NworError
    from nwor_specpv.vllm.specpv import rules

    settings = load_config({"enable_specpv": True, "specpv_mode": "lossless"})
    speculative = SimpleNamespace(
        method="eagle3",
        model="h",
        num_speculative_tokens=LIMIT,
        num_speculative_tokens_per_batch_size=ranges,
    )
    config = SimpleNamespace(
        speculative_config=speculative,
        model_config=SimpleNamespace(
            is_multimodal_model=False,
            uses_mrope=False,
            max_model_len=32768,
            get_vocab_size=lambda: 50,
        ),
        scheduler_config=SimpleNamespace(scheduler_cls=None, async_scheduling=True),
        cache_config=SimpleNamespace(
            enable_prefix_caching=False, cache_dtype="auto", block_size=PAGE
        ),
        parallel_config=SimpleNamespace(data_parallel_size=1, enable_eplb=False),
        device_config=SimpleNamespace(device_type="cuda"),
        lora_config=None,
        kv_transfer_config=None,
        use_v2_model_runner=True,
    )

    def begin(self: Any, vllm_config: Any, _: Any) -> None:
        self.num_speculative_steps, self.max_num_reqs = LIMIT, BATCH
        self.device, self.vllm_config = torch.device("cpu"), vllm_config
        self.vocab_size, self.draft_logits = 50, None
        self.use_local_argmax_reduction = False
        self.speculative_config, self.seeds = vllm_config.speculative_config, torch.zeros(BATCH)

    def engine_of(vllm_config: Any) -> Any:
        rules.judge(settings, rules.describe(vllm_config), None)
        return SimpleNamespace(settings=settings, lengths=Lengths(settings, LIMIT))

    monkeypatch.setattr(speculator_module().EagleSpeculator, "__init__", begin)
    monkeypatch.setattr(proposals_module(), "engine_of", engine_of)
    cpu = torch.device("cpu")
    if ranges is None:
        speculator_module().PartialViewSpeculator(config, cpu)
        return
    with pytest.raises(NworError, match="num_speculative_tokens_per_batch_size"):
        speculator_module().PartialViewSpeculator(config, cpu)
    assert speculative.num_speculative_tokens_per_batch_size is ranges
