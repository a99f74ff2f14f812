#!/usr/bin/env python3
"""Sums what ncu.sh collected: per engine and acceptance rate, bytes of one step.

python ncu_table.py KERNELS.csv STEPS_OUTPUT.txt RESULT.json
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

MARKER = "erfinv"
# Kernels that write K/V, by a word of their names.
WRITERS = {"reshape_and_cache": "vLLM write", "MergeRowsKernel": "merge_rows",
           "StageKernel": "stage", "CommitKernel": "commit"}  # fmt: skip
SECTOR_BYTES = 32


def main() -> int:
    kernels, output, result = (Path(name) for name in sys.argv[1:4])
    lines = output.read_text().splitlines()
    pieces = [json.loads(line[6:]) for line in lines if line[:6] == "piece "]
    sums = cut(read(kernels))
    if len(sums) != len(pieces):
        print(f"got {len(sums)} pieces of the kernel list, expected {len(pieces)}", file=sys.stderr)
        return 1
    rows = [piece | found for piece, found in zip(pieces, sums, strict=True)]
    told = json.loads(next(line[5:] for line in lines if line[:5] == "told "))
    result.write_text(json.dumps(told | {"pieces": rows}, indent=1))
    for row in rows:
        writes = ", ".join(f"{k} {v / 1e6:.2f}" for k, v in row["l2_write_bytes"].items())
        read_mb, written_mb = row["dram_read_bytes"] / 1e6, row["dram_write_bytes"] / 1e6
        print(f"{row['side']:6} {row['batch']} x {row['context']} {row['acceptance']:.1f}: "
              f"{row['kernels']} kernels, DRAM read {read_mb:.1f} MB, written {written_mb:.1f} MB; "
              f"L2 writes, MB: {writes}")  # fmt: skip
    return 0


def read(path: Path) -> list[dict[str, str]]:
    """Rows of ncu's raw page; its second line holds units."""
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    return [row for row in rows if row["ID"]]


def number(row: dict[str, str], metric: str) -> float:
    return float(row[metric].replace(",", ""))


def cut(rows: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Sums of the kernels between one marker and the next."""
    pieces: list[dict[str, Any]] = []
    for row in rows:
        name = row["Kernel Name"]
        if MARKER in name:
            pieces.append({"kernels": 0, "dram_read_bytes": 0.0, "dram_write_bytes": 0.0,
                           "l2_write_bytes": Counter()})  # fmt: skip
            continue
        if not pieces:
            continue
        piece = pieces[-1]
        piece["kernels"] += 1
        piece["dram_read_bytes"] += number(row, "dram__bytes_read.sum")
        piece["dram_write_bytes"] += number(row, "dram__bytes_write.sum")
        for word, label in WRITERS.items():
            if word in name:
                sectors = number(row, "lts__t_sectors_op_write.sum")
                piece["l2_write_bytes"][label] += SECTOR_BYTES * sectors
                break
    return pieces


if __name__ == "__main__":
    raise SystemExit(main())
