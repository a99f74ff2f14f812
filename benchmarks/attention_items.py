"""What a work item costs: the same tokens as few requests and as many, 8 rows, bfloat16.

    python benchmarks/attention_items.py [--json FILE]        about 20 s

Every shape has 262144 tokens and so the same floor; the plan cuts them into more or fewer items,
whose number is read from the plan. The line through (items per CTA, time above the floor) is what
an item costs a CTA, and what is left at no items the launch. float8 caches with one row follow:
other leaves, half the bytes, another kernel.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from attention_inputs import Bench, Case, measured_with
from attention_peers import read_floor

from nwor_specpv.bench.timing import capture, cold_l2, time_graphs

TOKENS = 262144
FP8 = "float8_e4m3fn"
CASES = [
    *[Case("items", (TOKENS // b,) * b, 8) for b in (2, 4, 8, 16, 32, 33, 64)],
    *[Case("items", (TOKENS // b // 16 * 16,) * b, 8) for b in (5, 6, 7, 9, 10, 12)],
    Case("items", (32768,) * 4 + (4096,) * 32, 8),
    *[Case("items", (TOKENS // b,) * b, 1, cache=FP8) for b in (4, 8, 16, 32)],
    Case("items", (TOKENS // 9 // 16 * 16,) * 9, 1, cache=FP8),
]


def measure(case: Case, read, replays: int) -> dict:
    bench = Bench(case, seed=1)
    # PlanHeader: the number of items, and of rows and heads that several items share.
    items, split = bench.plans[False][:8].view(torch.int32).tolist()
    variants = {"ours": lambda s: bench.ours(s, False), "read": lambda s: read(bench, s)}
    graphs = {}
    for name, run in variants.items():

        def all_sets(run=run) -> None:
            for i in range(bench.calls):
                run(bench.sets[i % len(bench.sets)])

        graphs[name] = capture(all_sets)
    calls = dict.fromkeys(graphs, bench.calls)
    taken = time_graphs(graphs, calls, replays, before=cold_l2())
    us = {name: timing.median_us for name, timing in taken.items()}
    return {"name": case.name, "rows": case.rows, "cache": case.cache, "us": us,
            "items": items, "split_pairs": split}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once-float8", action="store_true", help="one call, for a profiler")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("attention_items: no CUDA device", file=sys.stderr)
        return 1
    if options.once_float8:
        bench = Bench(Case("items", (32768,) * 8, 1, cache=FP8), seed=1, most_sets=1)
        bench.ours(bench.sets[0], False)
        torch.cuda.synchronize()
        return 0
    read, results = read_floor(), []
    ctas = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    print(f"{'B x L':<24}{'rows':>5}{'items':>7}{'per CTA':>9}{'ours us':>9}{'read us':>9}  above")
    for case in CASES:
        one = measure(case, read, options.replays)
        results.append(one)
        us = one["us"]
        name = one["name"] + (" fp8" if case.cache == FP8 else "")
        print(
            f"{name:<24}{one['rows']:>5}{one['items']:>7}{one['items'] / ctas:>9.2f}"
            f"{us['ours']:>9.1f}{us['read']:>9.1f}  {us['ours'] - us['read']:.1f}",
            flush=True,
        )
        torch.cuda.empty_cache()
    if options.json:
        document = {"environment": measured_with(), "ctas": ctas, "results": results}
        options.json.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
