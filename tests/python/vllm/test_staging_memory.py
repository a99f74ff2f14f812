"""Steps of an engine whose host has no memory for staging: they are written directly."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nwor_specpv.vllm.faults import Faults
from nwor_specpv.vllm.settings import read_settings
from nwor_specpv.vllm.staging import Staging
from nwor_specpv.vllm.steps import Steps

LAYERS, PAGES, SIZE, HEADS, DIM = 64, 9, 16, 8, 256
DRAFTS = 128
SLOTS = torch.arange(3, 4 + DRAFTS)  # of a root and its drafts
# Keys of the drafts take twice as much, in one piece. Larger pieces are always asked of the system.
LEFT = 32 << 20


@contextmanager
def little_memory() -> Iterator[None]:
    """The system gives this process LEFT more bytes at most."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LEFT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class World:
    """The plugin's steps over layers of one cache, which they all write alike."""

    def __init__(self) -> None:
        self.cache = torch.zeros(PAGES, HEADS, SIZE, 2 * DIM)
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.float32),
            parallel_config=None,
            kv_transfer_config=None,
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=0),
        )
        layers = {str(n): SimpleNamespace(kv_cache=self.cache) for n in range(LAYERS)}
        self.faults = Faults(recovers=True)
        keys = {"staging_rows": 1}
        staging = Staging(layers, read_settings({"nwor_specpv": keys}, {}), config, 4, self.faults)
        staging.groups = [list(layers)]
        self.interceptor = staging.bind(SLOTS.device)
        self.steps = Steps(staging, self.faults)

    def begin(self) -> bool:
        self.steps.begin(0, [1 + DRAFTS], [DRAFTS], SLOTS)
        return self.steps.stages

    def finish(self, accepted: int) -> None:
        rows = torch.randn(2, 1 + DRAFTS, HEADS, DIM)
        self.cache.zero_()
        for layer in range(LAYERS):
            assert self.steps.write(str(layer), *rows, SLOTS)
        self.steps.finish(lambda drafts: torch.full_like(drafts, accepted))
        self.rows = torch.cat(rows.unbind(), dim=-1)

    def written(self) -> list[int]:
        """The rows that are in their slots."""
        pages = self.cache.transpose(1, 2).reshape(PAGES * SIZE, HEADS, 2 * DIM)
        found = (pages[SLOTS] == self.rows).flatten(1).all(1).nonzero().flatten().tolist()
        assert pages.flatten(1).any(1).sum() == len(found)
        return found


def test_steps_without_memory_for_staging_are_written_directly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World()
    with caplog.at_level(logging.WARNING, "nwor_specpv"):
        with little_memory():
            assert not world.begin()
        world.finish(2)
        assert world.written() == list(range(1 + DRAFTS))
        stats = world.interceptor.stats()
        assert stats["fallbacks"] == {"out_of_memory": 1}
        assert (stats["staging_bytes"], stats["committed_tokens"], stats["rounds"]) == (0, 0, 1)
        direct = 1
        while not world.begin():
            direct += 1
            assert direct < 1000
    world.finish(2)
    assert world.written() == [0, 1, 2]
    stats = world.interceptor.stats()
    assert stats["fallbacks"] == {"out_of_memory": direct}
    assert stats["committed_tokens"] == 2
    assert caplog.text.count("nwor_specpv bypass (out_of_memory)") == 1
    assert not world.faults.drafts_are_off
