"""The merge of rows in flight overlaps with FlashAttention-3 only where its combine was read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from nwor_specpv import _C
from nwor_specpv.models import stories
from nwor_specpv.vllm import plugin, versions
from support.engines import drive, greedy, start, story_prompts
from support.flash_double import flash_attention
from support.installed import ADAPTER


@pytest.mark.parametrize("waits", [False, True])
def test_the_merge_overlaps_where_the_combine_is_known_to_wait(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge, seen = _C.merge_and_write_rows, set()

    def merged(*args: Any, overlaps: bool, **kwargs: Any) -> None:
        seen.add(overlaps)
        merge(*args, overlaps=overlaps, **kwargs)

    monkeypatch.setattr(_C, "merge_and_write_rows", merged)
    model = {"model": str(stories(64)), "skip_tokenizer_init": True}
    with flash_attention(plugin.CUDA_BACKEND):
        llm = start({"strict": True}, **model)  # which chooses the adapter
        adapter = dataclasses.replace(ADAPTER, flash_combine_waits=waits)
        monkeypatch.setattr(versions, "adapter", adapter)
        drive(llm, story_prompts(2), greedy(24))
    assert seen == {waits}


def test_only_versions_whose_flash_attention_was_read_overlap() -> None:
    known = {known.version for known in versions.ADAPTERS if known.flash_combine_waits}
    assert known == {"0.26.0"}
