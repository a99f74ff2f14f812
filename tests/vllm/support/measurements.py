"""Whether measuring what passes cost writes to the caches that vLLM serves from."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from support.engines import own_engine


def watch_measurements(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> list[bool]:
    """For each call of `module.name`: whether the caches, filled with something, were the same
    afterwards."""
    measure, found = getattr(module, name), []

    def watched(*args: Any) -> Any:
        caches = [layer.kv_cache for layer in own_engine().layers.values()]
        for cache in caches:
            cache.normal_()
        held = [cache.clone() for cache in caches]
        costs = measure(*args)
        found.append(all(map(torch.equal, held, caches)))
        for cache in caches:
            cache.zero_()
        return costs

    monkeypatch.setattr(module, name, watched)
    return found
