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
