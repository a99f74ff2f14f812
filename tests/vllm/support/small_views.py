"""Views so small that short prompts outgrow them, and prompts on both sides of them."""

from __future__ import annotations

from typing import Any

import pytest

from support.engines import story_prompts

# A view of 96 tokens: one block of sink, three that are chosen, two of window.
SMALL_VIEW = {
    "enable_specpv": True,
    "specpv_n_sink_blocks": 1,
    "specpv_n_retrieval_blocks": 3,
    "specpv_n_window_blocks": 2,
    "strict": True,
}
LENGTHS = (200, 40, 260, 150, 10, 230)  # two are shorter than the view


def prompts() -> list[list[int]]:
    return [(p * 40)[:n] for p, n in zip(story_prompts(6), LENGTHS, strict=True)]


def varied_prompt(length: int = 170) -> list[int]:
    """A prompt longer than the view. After 170 tokens all but the next one, after 153 the next one
    as well may be many."""
    text = [token for prompt in story_prompts(6) for token in prompt]
    return (text + text[::-1] + text[::2])[:length]


def cover_all(monkeypatch: pytest.MonkeyPatch, tokens: int = 64) -> None:
    """Lets requests of more than so many tokens be partial in mode `refresh` though their view
    covers them: it then holds all blocks."""
    from nwor_specpv import PartialCache, SpecPVConfig
    from nwor_specpv.vllm.specpv.refresh_requests import RefreshRequests

    def new_cache(self: Any) -> PartialCache:
        """With a budget that calls little short; views are built with the real one."""
        real = self._store.config
        keys = [key for key in dir(real) if key.startswith(("enable_", "specpv_"))]
        small = SpecPVConfig(**{key: getattr(real, key) for key in keys})
        others = small.specpv_n_sink_blocks + small.specpv_n_window_blocks
        small.specpv_n_retrieval_blocks = tokens // small.specpv_block_size - others
        cache = PartialCache(small, self._max_rows)
        assert cache.budget.static_tokens == tokens
        return cache

    monkeypatch.setattr(RefreshRequests, "_new_cache", new_cache)
