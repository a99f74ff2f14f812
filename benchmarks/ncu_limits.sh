#!/usr/bin/env bash
# What limits verify attention at one shape after another, by Nsight Compute: see ncu_limits.py.
#
#   benchmarks/ncu_limits.sh [FILE.json]      prints the table, writes FILE.json if given
#
# Needs what ncu_ranges.sh needs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
read -ra sections <<<"$("$python" "$here/ncu_limits.py" sections)"

"${NCU:-ncu}" --profile-from-start off --clock-control none --cache-control all "${sections[@]}" \
  --csv --page raw "$python" "$here/ncu_limits.py" drive "$work/plan.json" >"$work/raw.csv" || {
  cat "$work/raw.csv" >&2
  exit 1
}
"$python" "$here/ncu_limits.py" table "$work/plan.json" "$work/raw.csv" ${1:+--json "$1"}
