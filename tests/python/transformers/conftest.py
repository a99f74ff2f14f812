"""What these tests keep, they keep in folders of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from nwor_specpv.transformers import row_costs


@pytest.fixture(autouse=True)
def costs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where row costs are kept: a test must not find those of another."""
    monkeypatch.setattr(row_costs, "cache_root", lambda: tmp_path / "kept")
    return tmp_path / "kept" / "row_costs"
