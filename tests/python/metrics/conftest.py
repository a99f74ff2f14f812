"""Series are named by rank and ports shifted by it: a launcher's around the tests is not theirs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
