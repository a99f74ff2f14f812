"""`merge_and_write_rows` behind FlashAttention-3 where no request of a batch has several splits.

FlashAttention's combine has nothing to do then, and its thread blocks end before the attention they
are launched behind. Where the merge may overlap, its result must still be that of a merge that
waits for everything.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nwor_specpv import _C, Interceptor, NworConfig
from support.installed import ADAPTER

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

REQUESTS, ROWS, HEADS, KV_HEADS, DIM, PAGE = 16, 5, 32, 8, 128, 16
LENGTH, TURNS, MOST_SPLITS = 4096, 300, 32


def test_the_merge_waits_for_attention_of_one_split() -> None:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    generator = torch.Generator("cuda").manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    pages = LENGTH // PAGE
    cache = draw(2, REQUESTS * pages, PAGE, KV_HEADS, DIM)
    table = torch.arange(REQUESTS * pages, dtype=torch.int32, device="cuda").view(REQUESTS, pages)
    lens = torch.full((REQUESTS,), LENGTH, dtype=torch.int32, device="cuda")
    start = ROWS * torch.arange(REQUESTS + 1, dtype=torch.int32, device="cuda")
    query = draw(REQUESTS * ROWS, HEADS, DIM)
    key, value = draw(2, REQUESTS * ROWS, KV_HEADS, DIM)
    shape: dict[str, Any] = {"max_seqlen_q": ROWS, "max_seqlen_k": LENGTH}
    # Heads of many requests fill the device, so the planner gives each request one split.
    metadata = get_scheduler_metadata(
        batch_size=REQUESTS, num_heads_q=HEADS, num_heads_kv=KV_HEADS, headdim=DIM,
        cache_seqlens=lens, qkv_dtype=query.dtype, cu_seqlens_q=start, page_size=PAGE,
        causal=False, num_splits=MOST_SPLITS, **shape,
    )  # fmt: skip
    interceptor = Interceptor(NworConfig())

    def step(*, overlaps: bool) -> torch.Tensor:
        out = torch.full_like(query, float("nan"))
        _, lse = flash_attn_varlen_func(
            q=query, k=cache[0], v=cache[1], out=out, cu_seqlens_q=start, seqused_k=lens,
            softmax_scale=DIM**-0.5, causal=False, block_table=table, return_softmax_lse=True,
            scheduler_metadata=metadata, num_splits=MOST_SPLITS, fa_version=3, **shape,
        )  # fmt: skip
        _C.merge_and_write_rows(
            interceptor, "layer", query, key, value, out, lse.transpose(0, 1), start, DIM**-0.5,
            out, rows_per_request=ROWS, overlaps=overlaps,
        )  # fmt: skip
        return out

    expected = step(overlaps=False)
    torch.cuda.synchronize()
    assert not expected.isnan().any()
    if not ADAPTER.flash_combine_waits:
        pytest.skip(f"with vLLM {ADAPTER.version} the merge does not overlap")
    for _ in range(TURNS):
        assert torch.equal(step(overlaps=True), expected)
