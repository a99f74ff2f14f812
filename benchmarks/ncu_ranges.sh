#!/usr/bin/env bash
# One of the Nsight Compute benchmarks of this folder: NAME.py beside this script.
#
#   benchmarks/ncu_ranges.sh NAME [FILE.json]      prints the table, writes FILE.json if given
#
# PYTHON (default python3) must import nwor_specpv and see a GPU; NCU names another ncu. Performance
# counters need permission: run as root, or set NVreg_RestrictProfilingToAdminUsers=0.
set -euo pipefail
name=${1:?"usage: ncu_ranges.sh NAME [FILE.json]"}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
ncu=${NCU:-ncu}
if ! command -v "$ncu" >/dev/null; then
  echo "ncu_ranges.sh: Nsight Compute (ncu) not found; install it or set NCU" >&2
  exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Whole ranges, caches as they are. The program runs once per pass; its ranges are the same each time.
"$ncu" --replay-mode app-range --clock-control none --cache-control none \
  --metrics "$("$python" "$here/$name.py" metrics)" --csv --page raw \
  "$python" "$here/$name.py" drive "$work/plan.json" >"$work/raw.csv" || {
  cat "$work/raw.csv" >&2
  exit 1
}
"$python" "$here/$name.py" table "$work/plan.json" "$work/raw.csv" ${2:+--json "$2"}
