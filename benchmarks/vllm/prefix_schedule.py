#!/usr/bin/env python3
"""FlashAttention-3 over paged prefixes, by how finely its schedule cuts them.

    python benchmarks/vllm/prefix_schedule.py --json FILE
    python benchmarks/vllm/prefix_schedule.py --heads 14 2 64 --rows 1 9 17 --cells 24x30720

Its planner gives each SM one piece of a request. Told of more SMs than there are (`times`), it cuts
finer pieces, which SMs take as they become free. Times are per call, in a CUDA graph over several
caches; `causal` is what vLLM does without the plugin: the rows are in the cache. So are single rows
on every side. `chosen` is the number of SMs that the plugin tells, relative to those there are.
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
from nwor_specpv.vllm.backend.prefix_schedule import pieces_of_rows, pretended_sms

HEADS = (32, 8, 128)  # of queries, of K/V, and their channels
BLOCK, MAX_SPLITS = 16, 32
MOST_ROWS = 64
CELLS = [f"{b}x{n}" for n in (1024, 8192, 30720) for b in (1, 8, 24)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--heads", type=int, nargs=3, default=HEADS)
    parser.add_argument("--rows", type=int, nargs="+", default=[5, 8])
    parser.add_argument("--cells", nargs="+", default=CELLS, help="REQUESTSxTOKENS")
    parser.add_argument("--times", type=float, nargs="+", default=[1, 1.5, 2, 3, 4, 6, 8])
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    names = "".join(f"x {times:<7g}" for times in args.times)
    print(f"us per call      causal   chosen           {names}")
    result = []
    for batch, tokens in (map(int, cell.split("x")) for cell in args.cells):
        caches = make_caches(batch, tokens, tuple(args.heads))
        for rows in args.rows:
            cell = Cell(batch, tokens, rows, tuple(args.heads), caches)
            chosen = cell.chosen()
            found = {"causal": cell.measure(None, args.replays)}
            found |= {"chosen": cell.measure(chosen, args.replays)}
            found |= {f"{times:g}": cell.measure(times, args.replays) for times in args.times}
            sizes = {"batch": batch, "tokens": tokens, "rows": rows}
            result.append(sizes | {"chosen": chosen, "us": found})
            causal, ours, *others = found.values()
            print(f"{batch} x {tokens} x {rows}".ljust(17)
                  + f"{causal:<9.2f}{ours:<9.2f}x {chosen:<6.2f}"
                  + "".join(f"{us:<9.2f}" for us in others), flush=True)  # fmt: skip
        del caches
    if args.json:
        told = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        told["heads"] = list(args.heads)
        Path(args.json).write_text(json.dumps(told | {"cells": result}, indent=1))
    return 0


def pages_of(tokens: int) -> int:
    """Of a request, with room for its rows."""
    return (tokens + MOST_ROWS) // BLOCK + 1


def make_caches(batch: int, tokens: int, heads: tuple[int, int, int]) -> list[torch.Tensor]:
    """Enough of them that none is still in the L2 cache when its turn comes again."""
    _, kv_heads, head_dim = heads
    pages = batch * pages_of(tokens)
    size = pages * kv_heads * BLOCK * 2 * head_dim * 2
    count = max(2, min(32, (256 << 20) // size))
    shape = (pages, kv_heads, BLOCK, 2 * head_dim)
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(count)]


class Cell:
    """One batch; a call is FlashAttention-3 as vLLM's backend, or ours, calls it."""

    def __init__(
        self,
        batch: int,
        tokens: int,
        rows: int,
        heads: tuple[int, int, int],
        caches: list[torch.Tensor],
    ) -> None:
        self._batch, self._tokens, self._rows, self._heads = batch, tokens, rows, heads
        self._sms = torch.cuda.get_device_properties(0).multi_processor_count
        self._caches = [cache_views(cache, "packed") for cache in caches]
        pages = pages_of(tokens)
        table = torch.arange(batch * pages, dtype=torch.int32, device="cuda")
        self._table = table.view(batch, pages)
        self._query = torch.randn(
            batch * rows, heads[0], heads[2], dtype=torch.bfloat16, device="cuda"
        )
        self._out = torch.empty_like(self._query)
        self._start = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * rows

    def chosen(self) -> float:
        """SMs that the plugin tells the planner of, relative to those there are."""
        heads, kv_heads, head_dim = self._heads
        pieces = kv_heads * pieces_of_rows(self._rows * (heads // kv_heads), head_dim)
        batch, rows = self._batch, self._batch * self._rows
        told = pretended_sms(batch * self._tokens, batch, rows, pieces, self._sms, MAX_SPLITS)
        return told / self._sms

    def measure(self, times: float | None, replays: int) -> float:
        """`times`: SMs that the planner is told of, relative to those there are; None: as vLLM."""
        causal = times is None or self._rows == 1
        tokens = self._tokens + (self._rows if causal else 0)
        lens = torch.full((self._batch,), tokens, dtype=torch.int32, device="cuda")
        limit = self._tokens + BLOCK
        schedule = get_scheduler_metadata(
            batch_size=self._batch,
            max_seqlen_q=self._rows,
            max_seqlen_k=limit,
            num_heads_q=self._heads[0],
            num_heads_kv=self._heads[1],
            headdim=self._heads[2],
            cache_seqlens=lens,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=self._start,
            page_size=BLOCK,
            causal=causal,
            num_splits=MAX_SPLITS,
            sm_margin=0 if times is None else self._sms - round(self._sms * times),
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
