"""What all folders of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

# Whole models run here, side by side: threads of theirs would wait for each other.
ONE_THREAD = ("cli", "engine", "transformers", "worker")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Series are named by rank and ports shifted by it: a launcher's are not the tests'."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True, scope="module")
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    if request.path.parent.name in ONE_THREAD:
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
