"""What is left of vLLM's memory for views: as much as they then take."""

from __future__ import annotations

import os
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor_specpv.config import Settings
from nwor_specpv.vllm.specpv import memory
from nwor_specpv.vllm.specpv.refresh import RefreshViews
from nwor_specpv.vllm.specpv.tail import Tail
from nwor_specpv.vllm.specpv.views import ViewStore

SEED = int(os.environ.get("NWOR_TEST_SEED", random.randrange(2**31)))


class Engine:
    """A random model, its caches and the configuration that says so."""

    def __init__(self, rng: random.Random, *, mode: str, float8: bool, retrieves: bool) -> None:
        self.layers, self.heads, self.size = rng.randint(1, 3), rng.randint(1, 3), 64
        self.batch, self.drafts, self.pages = rng.randint(1, 9), rng.randint(5, 16), 600
        self.query_heads = self.heads * rng.randint(1, 4)
        self.max_tokens = 16 * rng.randint(40, 300)
        self.dtype = rng.choice([torch.float16, torch.bfloat16])
        selector = "specpv" if retrieves else "streaming"
        self.settings = Settings(
            enable_specpv=True,
            specpv_mode=mode,
            specpv_selector=selector,
            specpv_n_retrieval_blocks=rng.randint(1, 30),
            specpv_max_requests=self.batch,
        )
        dtype = torch.float8_e4m3fn if float8 else self.dtype
        shape = (self.pages, 16, self.heads, self.size)
        self.caches = [torch.zeros(shape).to(dtype) for _ in range(self.layers)]
        model = SimpleNamespace(
            dtype=self.dtype,
            max_model_len=self.max_tokens,
            get_num_layers=lambda _: self.layers,
            get_num_kv_heads=lambda _: self.heads,
            get_num_attention_heads=lambda _: self.query_heads,
            get_head_size=lambda: self.size,
        )
        self.config = SimpleNamespace(
            model_config=model,
            parallel_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=self.batch),
            cache_config=SimpleNamespace(cache_dtype="fp8" if float8 else "auto"),
            num_speculative_tokens=self.drafts,
        )

    @property
    def cache_bytes(self) -> int:
        return 2 * sum(cache.nbytes for cache in self.caches)  # K and V

    def views(self) -> int:
        """Bytes that views take."""
        sizes: dict[str, Any] = {"max_batch": self.batch, "max_tokens": self.max_tokens}
        if self.settings.specpv_mode == "refresh":
            rows = 1 + self.drafts
            views = RefreshViews(
                self.settings,
                [str(number) for number in range(self.layers)],
                self.caches,
                max_rows=rows,
                num_heads=self.query_heads,
                dtype=self.dtype,
                **sizes,
            )
            return views.store.bytes + views._queries.nbytes
        rows = 1 + self.settings.specpv_draft_lookup
        store = ViewStore(
            self.settings.specpv(),
            self.caches,
            max_requests=self.batch,
            max_rows=rows,
            dtype=self.dtype,
            **sizes,
        )
        return store.bytes + Tail(self.caches, self.batch, self.drafts + rows, self.dtype).bytes


@pytest.mark.parametrize("mode", ["lossless", "refresh"])
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("retrieves", [False, True])
def test_caches_and_views_take_what_there_is(mode: str, *, float8: bool, retrieves: bool) -> None:
    print(f"seed={SEED}")
    rng = random.Random(SEED)
    for _ in range(5):
        engine = Engine(rng, mode=mode, float8=float8, retrieves=retrieves)
        views = engine.views()
        there_is = engine.cache_bytes + views
        left = memory.describe(engine.settings, engine.config).left_for_caches(there_is)
        # A tail is rounded up to whole pages of 16 tokens: one such page of each request.
        page = 2 * 16 * engine.batch * engine.layers * engine.heads * engine.size * 2
        assert abs(left - engine.cache_bytes) <= 0.01 * there_is + page


def test_nothing_is_left_where_views_alone_are_too_large() -> None:
    assert memory.ViewMemory(1 / 16, 1000).left_for_caches(900) == 0
