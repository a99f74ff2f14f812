"""How much staging an engine reserves, on made-up layers."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv import RoundPlan
from nwor_specpv.vllm import staging
from nwor_specpv.vllm.faults import Faults
from nwor_specpv.vllm.settings import read_settings

PAGES, SIZE, HEADS, DIM = 4, 16, 2, 64


@pytest.mark.parametrize(
    ("room", "rows"),
    [(5000, 4096), (4096, 4096), (4095, 4095), (512, 512), (511, 4096), (0, 4096)],
    ids=["more", "just", "less", "those of graphs", "less than those", "none"],
)
def test_what_fits_is_reserved_as_long_as_graphs_fit(room: int, rows: int) -> None:
    """DraftLoop in graphs are all staged or never: beyond the room is what never fits."""
    assert staging.rows_in_room(4096, 512, room) == rows


@pytest.mark.parametrize("counts_all", [False, True], ids=["CPU", "GPU"])
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_worker_of_a_host_has_a_number_of_its_own(
    tensor_parallel: int, counts_all: bool
) -> None:
    """vLLM numbers workers of data-parallel ranks in two ways."""
    found = []
    for rank in range(3):
        parallel = SimpleNamespace(world_size=tensor_parallel, data_parallel_rank_local=rank)
        for local in range(tensor_parallel):
            told = local + counts_all * rank * tensor_parallel
            found.append(staging.worker_of_host(told, parallel))
    assert found == list(range(3 * tensor_parallel))
    alone = SimpleNamespace(world_size=1, data_parallel_rank_local=None)
    assert staging.worker_of_host(0, alone) == 0


def made_up(max_num_seqs: int, **settings: Any) -> staging.Staging:
    """Three layers in two groups, one of them quantised, in an engine with 16 drafts."""
    plain = torch.zeros(PAGES, HEADS, SIZE, 2 * DIM, dtype=torch.bfloat16)
    codes = torch.zeros(PAGES, HEADS, SIZE, 2 * DIM, dtype=torch.uint8)
    scale = torch.ones(())
    layers = {
        "a": SimpleNamespace(kv_cache=plain),
        "b": SimpleNamespace(kv_cache=plain.clone()),
        "c": SimpleNamespace(kv_cache=codes, _k_scale=scale, _v_scale=scale),
    }
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        compilation_config=SimpleNamespace(max_cudagraph_capture_size=512),
        parallel_config=None,
        kv_transfer_config=None,
    )
    found = staging.Staging(
        layers,
        read_settings({"nwor_specpv": settings}, {}),
        config,
        16 * max_num_seqs,
        Faults(recovers=False),
    )
    found.groups = [["a", "b"], ["c"]]
    return found


def test_a_row_takes_what_the_library_says() -> None:
    made = made_up(8, staging_rows=40)
    made.bind(torch.device("cpu")).begin(RoundPlan([3], [2]))
    assert made.interceptor.stats()["staging_bytes"] == 40 * made._bytes_per_row()


def test_a_large_batch_leaves_small_ones_staged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As many requests as vLLM lets in on a large GPU: their drafts together fit no staging."""
    configs: list[Any] = []
    monkeypatch.setattr(staging, "Interceptor", configs.append)
    device = torch.device("cuda")
    made = made_up(1024, max_staging_bytes=4 << 20)
    room = (4 << 20) // made._bytes_per_row()
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        made._make_interceptor(device)
    held = f"holds {room} drafts, but a full batch has 16384: steps with more than {room} drafts"
    assert held in caplog.text
    caplog.clear()
    made_up(1024)._make_interceptor(device)
    assert caplog.text == ""
    made_up(1024, max_staging_bytes=1)._make_interceptor(device)
    assert "steps with more than 0 drafts are written directly" in caplog.text
    assert [config.staging_rows for config in configs] == [room, 16384, 16384]
    assert {config.graph_rows for config in configs} == {512}
