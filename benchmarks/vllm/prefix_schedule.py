#!/usr/bin/env python3
"""FlashAttention-3 over paged prefixes, by how finely its schedule cuts them.

    python benchmarks/vllm/prefix_schedule.py --json FILE

Its planner gives each SM one piece of a request. Told of more SMs than there are (`times`), it cuts
finer pieces, which SMs take as they become free. Times are per call, in a CUDA graph over several
caches; `causal` is what vLLM does without the plugin: the rows are in the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata

from nwor_specpv import cache_views

HEADS, KV_HEADS, HEAD_DIM, BLOCK, MAX_SPLITS = 32, 8, 128, 16, 32
CELLS = [(b, n) for n in (1024, 8192, 30720) for b in (1, 8, 24)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[5, 8])
    parser.add_argument("--times", type=float, nargs="+", default=[1, 1.5, 2, 3, 4, 6, 8])
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    print("us per call   causal  " + "".join(f"x {times:<7g}" for times in args.times))
    result = []
    for batch, tokens in CELLS:
        caches = make_caches(batch, tokens)
        for rows in args.rows:
            cell = Cell(batch, tokens, rows, caches)
            found = {"causal": cell.measure(None, args.replays)}
            found |= {f"{times:g}": cell.measure(times, args.replays) for times in args.times}
            result.append({"batch": batch, "tokens": tokens, "rows": rows, "us": found})
            print(f"{batch} x {tokens} x {rows}".ljust(14)
                  + "".join(f"{us:<9.2f}" for us in found.values()), flush=True)  # fmt: skip
        del caches
    if args.json:
        told = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        Path(args.json).write_text(json.dumps(told | {"cells": result}, indent=1))
    return 0


def make_caches(batch: int, tokens: int) -> list[torch.Tensor]:
    """Enough of them that none is still in the L2 cache when its turn comes again."""
    pages = batch * (tokens // BLOCK + 1)
    size = pages * KV_HEADS * BLOCK * 2 * HEAD_DIM * 2
    count = max(2, min(32, (256 << 20) // size))
    shape = (pages, KV_HEADS, BLOCK, 2 * HEAD_DIM)
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(count)]


class Cell:
    """One batch; a call is FlashAttention-3 as vLLM's backend, or ours, calls it."""

    def __init__(self, batch: int, tokens: int, rows: int, caches: list[torch.Tensor]) -> None:
        self._batch, self._tokens, self._rows = batch, tokens, rows
        self._caches = [cache_views(cache, "packed") for cache in caches]
        pages = tokens // BLOCK + 1
        table = torch.arange(batch * pages, dtype=torch.int32, device="cuda")
        self._table = table.view(batch, pages)
        self._query = torch.randn(
            batch * rows, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda"
        )
        self._out = torch.empty_like(self._query)
        self._start = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * rows

    def measure(self, times: float | None, replays: int) -> float:
        causal = times is None
        tokens = self._tokens + (self._rows if causal else 0)
        lens = torch.full((self._batch,), tokens, dtype=torch.int32, device="cuda")
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        limit = self._tokens + BLOCK
        schedule = get_scheduler_metadata(
            batch_size=self._batch,
            max_seqlen_q=self._rows,
            max_seqlen_k=limit,
            num_heads_q=HEADS,
            num_heads_kv=KV_HEADS,
            headdim=HEAD_DIM,
            cache_seqlens=lens,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self._start,
            page_size=BLOCK,
            causal=causal,
            num_splits=MAX_SPLITS,
            sm_margin=0 if causal else sms - round(sms * times),
        )

        def call(cache: Any) -> None:
            flash_attn_varlen_func(
                q=self._query,
                k=cache[0],
                v=cache[1],
                out=self._out,
                cu_seqlens_q=self._start,
                max_seqlen_q=self._rows,
                seqused_k=lens,
                max_seqlen_k=limit,
                causal=causal,
                block_table=self._table,
                return_softmax_lse=not causal,
                scheduler_metadata=schedule,
                num_splits=MAX_SPLITS,
                fa_version=3,
            )

        call(self._caches[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for cache in self._caches:
                call(cache)
        found = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(1e3 * begin.elapsed_time(end) / len(self._caches))
        return statistics.median(found)


if __name__ == "__main__":
    raise SystemExit(main())
