"""Plans of FlashAttention-3, made once for all layers: for the prefixes of verifying requests, and
for requests of one row each, whose attention is vLLM's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm import envs
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionMetadataBuilder,
    get_scheduler_metadata,
)

from nwor_specpv.vllm.support import is_quantized

from . import prefix_schedule


@dataclass
class PrefixSchedule:
    """How FlashAttention-3 shares out the attention of rows to what is in the cache."""

    max_prefix: int
    max_splits: int  # 0: as FlashAttention likes
    metadata: torch.Tensor | None  # None: FlashAttention plans in every layer


class PrefixPlanner:
    """Plans as vLLM's builder does, and cuts finer where that fills the device better.

    A graph finds its plan where it was captured: plans lie in one buffer if there are full graphs.
    """

    def __init__(
        self, builder: FlashAttentionMetadataBuilder, cache_dtype: str, device: torch.device
    ) -> None:
        self._builder = builder
        self._plans = builder.aot_schedule  # vLLM's builder may give it up for the requests behind
        self._dtype = torch.float8_e4m3fn if is_quantized(cache_dtype) else builder.kv_cache_dtype
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._keeps_place = builder.use_full_cuda_graph and builder.aot_schedule
        self._buffer: torch.Tensor | None = None
        self._used = 0  # words of it

    def plan(
        self,
        common: Any,
        prefix_lens: torch.Tensor,
        query_start: torch.Tensor,
        num_rows: int,
        max_rows: int,
        *,
        causal: bool = False,
    ) -> PrefixSchedule:
        """For requests of so many rows, at most `max_rows` each; `common` is the whole batch's.

        Without `causal` every row sees the prefix in whole.
        """
        builder = self._builder
        in_graph = builder.use_full_cuda_graph and num_rows <= (builder.max_cudagraph_size or 0)
        splits = builder.max_num_splits if in_graph else 0
        if envs.VLLM_BATCH_INVARIANT:
            return PrefixSchedule(common.max_seq_len, 1, None)
        if not self._plans:
            return PrefixSchedule(common.max_seq_len, splits, None)
        count = prefix_lens.shape[0]
        made = get_scheduler_metadata(
            batch_size=count,
            max_seqlen_q=max_rows,
            max_seqlen_k=common.max_seq_len,
            num_heads_q=builder.num_heads_q,
            num_heads_kv=builder.num_heads_kv,
            headdim=builder.headdim,
            cache_seqlens=prefix_lens,
            qkv_dtype=self._dtype,
            cu_seqlens_q=query_start,
            page_size=builder.block_size,
            causal=causal,
            num_splits=splits,
            sm_margin=self._sm_margin(common, count, num_rows, max_rows, splits),
        )
        return PrefixSchedule(common.max_seq_len, splits, self._placed(made))

    def _placed(self, made: torch.Tensor) -> torch.Tensor:
        """The plan where graphs look for it."""
        if not self._keeps_place:
            return made
        if self._buffer is None:
            # Not with the builder, whose memory is the caches': vLLM takes that away in its sleep,
            # and what was zero is anything when it wakes up.
            self._buffer = torch.zeros_like(self._builder.scheduler_metadata)
        size = made.shape[0]
        self._buffer[:size] = made
        if size < self._used:  # nothing of a larger batch may stand behind
            self._buffer[size : self._used] = 0
        self._used = size
        return self._buffer[:size]

    def _sm_margin(self, common: Any, count: int, num_rows: int, max_rows: int, splits: int) -> int:
        """SMs that FlashAttention-3 is to leave alone; below 0: it is told of more than there are.

        Without a number of splits that planner and kernel share, the planner's own way is taken.
        """
        builder, lens = self._builder, common.seq_lens_cpu_upper_bound
        if splits == 0 or lens is None:
            return 0
        packed = max_rows * (builder.num_heads_q // builder.num_heads_kv)
        pieces = builder.num_heads_kv * prefix_schedule.pieces_of_rows(packed, builder.headdim)
        tokens = max(0, int(lens[:count].sum()) - num_rows)
        sizes = (count, num_rows, pieces, self._num_sms, splits)
        return self._num_sms - prefix_schedule.pretended_sms(tokens, *sizes)
