"""What limits verify attention and FlashAttention-3 at one shape after another, by Nsight Compute.

    drive PLAN          runs every shape, each kernel of a call inside a profiler range
    table PLAN CSV      puts Nsight's raw page beside the plan: a table, and JSON with --json FILE

`ncu_limits.sh` runs both; NWOR_NCU_ONLY leaves shapes out, for instance 12/2x128 or "16 float8".
Every kernel is profiled alone, from an empty L2 and at the clocks the
device chooses; of a call's kernels the longest counts. The time is not that of the benchmark, where
launches follow each other. Shares are of what the device could do: of DRAM's bandwidth, of the
matrix unit's cycles, of cycles in which a scheduler issues. Waits are warps per issued instruction
that wait for something, by what they wait for.
"""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ncu_ranges import run_command

LARGE = (32, 8, 128)  # heads, KV heads, channels
SMALL = ((14, 2, 64), (12, 2, 128), (9, 3, 64))  # Qwen2.5-0.5B and 1.5B, SmolLM2-135M
OF_SMALL = [(4608,), (4608,) * 8, (4608,) * 32, (32768,) * 8]
# Rows, float8 or not, and batches.
Shape = tuple[int, str, list[tuple[int, ...]]]
OF_LARGE: list[Shape] = [
    (1, "bfloat16", [(32768,) * 32]),
    (1, "float8_e4m3fn", [(32768,), (4608,) * 32, (32768,) * 8, (32768,) * 32]),
    (8, "bfloat16", [(4608,), (4608,) * 8, (4608,) * 32, (32768,), (32768,) * 4, (32768,) * 5,
                     (32768,) * 6, (32768,) * 8, (32768,) * 32, (131072,),
                     (32768,) * 4 + (2048,) * 28]),
    (8, "float8_e4m3fn", [(32768,), (4608,) * 32, (32768,) * 8, (32768,) * 32]),
    (16, "bfloat16", [(4608,), (4608,) * 8, (4608,) * 32, (32768,), (32768,) * 8, (32768,) * 32]),
    (16, "float8_e4m3fn", [(32768,), (4608,) * 32, (32768,) * 8]),
    (64, "bfloat16", [(4608,), (32768,), (32768,) * 8, (131072,)]),
]  # fmt: skip
SHAPES: dict[tuple[int, int, int], list[Shape]] = {LARGE: OF_LARGE} | {
    heads: [(rows, "bfloat16", OF_SMALL) for rows in (5, 16)] for heads in SMALL
}
SECTIONS = ("SpeedOfLight", "ComputeWorkloadAnalysis", "SchedulerStats", "WarpStateStats",
            "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy")  # fmt: skip
_MARK = "spin_kernel"  # torch's, behind each call

_DURATION = "gpu__time_duration.sum"
_DRAM = re.compile(r"^gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed$")
_TENSOR = re.compile(r"^sm__pipe_tensor_cycles_active\.avg\.pct_of_peak_sustained_active$")
_MATRIX_ISSUE = re.compile(
    r"^sm__inst_executed_pipe_tensor_op_gmma\.avg\.pct_of_peak_sustained_active$"
)
_ISSUE = re.compile(r"^smsp__issue_active\.avg\.pct_of_peak_sustained_active$")
_WAIT = re.compile(r"^smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio$")
_SCALES = {"second": 1e6, "s": 1e6, "msecond": 1e3, "ms": 1e3, "usecond": 1.0, "us": 1.0,
           "nsecond": 1e-3, "ns": 1e-3}  # fmt: skip


def shapes() -> Iterator[tuple[tuple[int, int, int], int, str, tuple[int, ...]]]:
    """Heads, rows, dtype of the cache and lengths; those with NWOR_NCU_ONLY in their names."""
    only = os.environ.get("NWOR_NCU_ONLY", "")
    for heads, of_heads in SHAPES.items():
        for rows, cache, batches in of_heads:
            for lens in batches:
                if only in f"{heads_of(heads)} {rows} {cache} {len(lens)}x{lens[0]}":
                    yield heads, rows, cache, lens


def heads_of(sizes: Sequence[int]) -> str:
    heads, kv_heads, head_dim = sizes
    return f"{heads}/{kv_heads}x{head_dim}"


def drive(plan_path: Path) -> int:
    import torch
    from attention_inputs import Bench, Case, measured_with
    from attention_peers import flash_attention_3

    theirs, missing = None, ""
    try:
        theirs = flash_attention_3()
    except Exception as error:
        missing = f"{type(error).__name__}: {error}"
    plan = []
    for (heads, kv_heads, head_dim), rows, cache, lens in shapes():
        case = Case("ncu", lens, rows, cache, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        bench = Bench(case, seed=1, most_sets=1)
        (one,) = bench.sets
        calls = {"ours": lambda bench=bench, one=one: bench.ours(one, tree=True)}
        if theirs is not None and cache == "bfloat16":
            calls["FA3"] = lambda bench=bench, one=one: theirs(bench, one)
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            call()
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
            told = {"rows": rows, "cache": cache, "heads": [heads, kv_heads, head_dim]}
            plan.append({"of": name, "name": case.name} | told | {"kv_bytes": bench.bytes})
        del bench, one, calls
        torch.cuda.empty_cache()
    document = measured_with() | {"missing_peer": missing, "calls": plan}
    plan_path.write_text(json.dumps(document, indent=1))
    return 0


def read_kernels(path: Path) -> list[dict[str, str]]:
    """One kernel's columns by name; units follow names in "NAME [unit]", keys of their own."""
    lines = path.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    header, units, *rows = csv.reader(lines[start:])
    of_units = {f"{name} [unit]": unit for name, unit in zip(header, units, strict=True)}
    return [dict(zip(header, row, strict=True)) | of_units for row in rows]


def calls_of(kernels: Sequence[dict[str, str]]) -> list[list[dict[str, str]]]:
    """Kernels of each call, without the marks behind them."""
    found: list[list[dict[str, str]]] = [[]]
    for kernel in kernels:
        if _MARK in kernel["Kernel Name"]:
            found.append([])
        else:
            found[-1].append(kernel)
    return found[:-1]


def number(text: str) -> float:
    return float(text.replace(",", ""))


def duration_us(kernel: dict[str, str]) -> float:
    return number(kernel[_DURATION]) * _SCALES[kernel[f"{_DURATION} [unit]"]]


def matching(kernel: dict[str, str], pattern: re.Pattern[str]) -> list[float]:
    return [number(text) for name, text in kernel.items() if pattern.search(name) and text]


def summary(kernels: Sequence[dict[str, str]]) -> dict:
    """What the longest of a call's kernels did."""
    longest = max(kernels, key=duration_us)
    waits = {}
    for name, text in longest.items():
        matched = _WAIT.search(name)
        if matched and text and not matched[1].endswith("not_issued"):
            waits[matched[1]] = number(text)
    return {
        "kernel": longest["Kernel Name"],
        "kernels": len(kernels),
        "us": duration_us(longest),
        "call_us": sum(map(duration_us, kernels)),
        "dram_percent": max(matching(longest, _DRAM), default=None),
        "tensor_percent": max(matching(longest, _TENSOR), default=None),
        "issue_percent": max(matching(longest, _ISSUE), default=None),
        # Warpgroup instructions alone: how many there are, not how long the unit works on them.
        "matrix_issue_percent": max(matching(longest, _MATRIX_ISSUE), default=None),
        "waits": dict(sorted(waits.items(), key=lambda item: -item[1])),
    }


def table(plan_path: Path, csv_path: Path, json_path: Path | None) -> int:
    plan = json.loads(plan_path.read_text())
    found = calls_of(read_kernels(csv_path))
    if len(found) != len(plan["calls"]):
        sys.exit(f"{csv_path}: got {len(found)} calls, expected {len(plan['calls'])}")
    print(f"{plan['device']} · torch {plan['torch']} · commit {plan['commit']}")
    print(f"{'B x L':<24}{'heads':<10}{'rows':>5} {'cache':<15}{'of':<6}{'us':>8}{'DRAM %':>8}"
          f"{'matrix %':>10}{'issue %':>9}  waits")  # fmt: skip
    for call, kernels in zip(plan["calls"], found, strict=True):
        call.update(summary(kernels))
        waits = ", ".join(f"{name} {value:.2f}" for name, value in list(call["waits"].items())[:4])
        shares = (call[f"{kind}_percent"] for kind in ("dram", "tensor", "issue"))
        dram, tensor, issue = ("-" if share is None else f"{share:.0f}" for share in shares)
        heads = heads_of(call.get("heads", LARGE))
        print(f"{call['name']:<24}{heads:<10}{call['rows']:>5} {call['cache']:<15}{call['of']:<6}"
              f"{call['us']:>8.1f}{dram:>8}{tensor:>10}{issue:>9}  {waits}")  # fmt: skip
    if json_path is not None:
        json_path.write_text(json.dumps(plan, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    options = " ".join(f"--section {name}" for name in SECTIONS)
    sys.exit(run_command(__doc__ or "", drive, table, ("sections", options)))
