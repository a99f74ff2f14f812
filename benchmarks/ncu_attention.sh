#!/usr/bin/env bash
# DRAM bytes that verify attention reads beside the K/V it has to read, by Nsight Compute.
#
#   benchmarks/ncu_attention.sh [FILE.json]      prints the table, writes FILE.json if given
#
# PYTHON (default python3) must import nwor_specpv and see a GPU; NCU names another ncu. Performance
# counters need permission: run as root, or set NVreg_RestrictProfilingToAdminUsers=0.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
ncu=${NCU:-ncu}
if ! command -v "$ncu" >/dev/null; then
  echo "ncu_attention.sh: Nsight Compute (ncu) not found; install it or set NCU" >&2
  exit 1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Whole ranges, caches as they are. The program runs once per pass; its ranges are the same each time.
"$ncu" --replay-mode app-range --clock-control none --cache-control none \
  --metrics "$("$python" "$here/ncu_attention.py" metrics)" --csv --page raw \
  "$python" "$here/ncu_attention.py" drive "$work/plan.json" >"$work/raw.csv" || {
  cat "$work/raw.csv" >&2
  exit 1
}
"$python" "$here/ncu_attention.py" table "$work/plan.json" "$work/raw.csv" ${1:+--json "$1"}
