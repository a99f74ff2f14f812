"""What the Nsight Compute benchmarks share: profiler ranges, their metrics, their raw page.

A benchmark has a drive(plan_path) that runs its ranges and writes what they are, and a
table(plan_path, csv_path, json_path) that puts the raw page beside it. `ncu_ranges.sh NAME` runs
both for NAME.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path

FLUSH_BYTES = 256 << 20
METRICS = {
    "dram_write": ("dram__bytes_write.sum", 1),
    "dram_read": ("dram__bytes_read.sum", 1),
    "l2_write": ("lts__t_sectors_op_write.sum", 32),
    "l2_read": ("lts__t_sectors_op_read.sum", 32),
}
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12, "sector": 1, "": 1}


def read_raw_page(path: Path) -> list[dict[str, float]]:
    """The metrics of each range, in bytes. Lines before the header are the program's own."""
    lines = path.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    header, units, *rows = csv.reader(lines[start:])
    found = []
    for row in rows:
        values = {}
        for name, (metric, scale) in METRICS.items():
            at = header.index(metric)
            values[name] = float(row[at].replace(",", "")) * UNITS[units[at]] * scale
        found.append(values)
    return found


def read_results(plan_path: Path, csv_path: Path) -> tuple[dict, list[dict[str, float]]]:
    """The plan and the metrics of its ranges, one for one."""
    plan = json.loads(plan_path.read_text())
    measured = read_raw_page(csv_path)
    if len(measured) != len(plan["ranges"]):
        found, expected = len(measured), len(plan["ranges"])
        sys.exit(f"{csv_path}: got {found} ranges, expected {expected}")
    return plan, measured


def run_command(
    description: str,
    drive: Callable[[Path], int],
    table: Callable[[Path, Path, Path | None], int],
    asked: tuple[str, str] = ("metrics", ",".join(metric for metric, _ in METRICS.values())),
) -> int:
    """`asked`: a third command, and what it prints: for Nsight Compute's command line."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("drive")
    one.add_argument("plan", type=Path)
    two = commands.add_parser("table")
    two.add_argument("plan", type=Path)
    two.add_argument("csv", type=Path)
    two.add_argument("--json", type=Path)
    commands.add_parser(asked[0])
    arguments = parser.parse_args()
    if arguments.command == "drive":
        return drive(arguments.plan)
    if arguments.command == "table":
        return table(arguments.plan, arguments.csv, arguments.json)
    print(asked[1])
    return 0
