"""What these tests keep, they keep in folders of their own; every step takes them the same time."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from nwor_specpv.transformers import decoding
from nwor_specpv.transformers.rows import costs


@pytest.fixture(autouse=True)
def costs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where row costs are kept: a test must not find those of another."""
    monkeypatch.setattr(costs, "cache_root", lambda: tmp_path / "kept")
    return tmp_path / "kept" / "row_costs"


@pytest.fixture(autouse=True)
def even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drafted is chosen by time: on a busy machine it would be anything."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: 1e-3 * next(ticks))
    for module in (decoding, costs):
        monkeypatch.setattr(module, "time", clock)
