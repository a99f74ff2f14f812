"""DRAM bytes that verify attention reads beside the K/V it has to read, by Nsight Compute.

    drive PLAN          runs every shape, each inside a profiler range
    table PLAN CSV      puts Nsight's raw page beside the plan: a table, and JSON with --json FILE

`ncu_attention.sh` runs both. A range attends to K/V sets in turn, at least 300 MB of them, none
twice, from an L2 that holds none of them: what exceeds the K/V's own size was read in vain.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ncu_ranges import FLUSH_BYTES, read_results, run_command

SHAPES = [
    ((4608,), 8),
    ((4608,) * 8, 16),
    ((32768,), 8),
    ((32768,) * 8, 1),
    ((32768,) * 8, 8),
    ((32768,) * 8, 64),
    ((32768,) * 32, 8),
    ((131072,), 8),
    ((32768,) * 4 + (2048,) * 28, 8),
]
GOAL = 1.05


def drive(plan_path: Path) -> int:
    import torch
    from attention_inputs import Bench, Case, measured_with

    flush = torch.ones(FLUSH_BYTES // 4, device="cuda")
    plan = []
    for lens, rows in SHAPES:
        case = Case("ncu", lens, rows)
        bench = Bench(case, seed=1)
        for profiled in (False, True):
            flush.sum()
            torch.cuda.synchronize()
            if profiled:
                torch.cuda.cudart().cudaProfilerStart()
            for one in bench.sets:
                bench.ours(one, tree=True)
            torch.cuda.synchronize()
            if profiled:
                torch.cuda.cudart().cudaProfilerStop()
        plan.append({"name": case.name, "rows": rows, "kv_bytes": bench.bytes * len(bench.sets)})
        del bench
        torch.cuda.empty_cache()
    document = measured_with() | {"goal": GOAL, "ranges": plan}
    plan_path.write_text(json.dumps(document, indent=1))
    return 0


def table(plan_path: Path, csv_path: Path, json_path: Path | None) -> int:
    plan, measured = read_results(plan_path, csv_path)
    print(f"{plan['device']} · torch {plan['torch']} · commit {plan['commit']} · tree mask, bf16")
    print(f"{'B x L':<22}{'rows':>5}{'K/V MB':>10}{'DRAM read MB':>14}{'read / K/V':>12}  goal")
    for one, values in zip(plan["ranges"], measured, strict=True):
        one.update(values)
        ratio = values["dram_read"] / one["kv_bytes"]
        verdict = "met" if ratio <= plan["goal"] else "missed"
        print(
            f"{one['name']:<22}{one['rows']:>5}{one['kv_bytes'] / 1e6:>10.1f}"
            f"{values['dram_read'] / 1e6:>14.1f}{ratio:>12.3f}  {plan['goal']} {verdict}"
        )
    if json_path is not None:
        json_path.write_text(json.dumps(plan, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(run_command(__doc__, drive, table))
