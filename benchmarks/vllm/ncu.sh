#!/usr/bin/env bash
# What a verification step moves, with and without the plugin, by Nsight Compute: DRAM bytes of the whole step, and
# L2 writes of the kernels that write K/V.
#   benchmarks/vllm/ncu.sh OUT.json [arguments of steps.py]
# Eager, because a replayed graph is one node to the profiler. All metrics fit one pass, so no kernel is run twice, and
# caches are left as they are: staged rows that stay in L2 are part of the answer.
set -euo pipefail
command -v ncu >/dev/null || { echo "ncu not found: install Nsight Compute" >&2; exit 1; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$1
shift
metrics=dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors_op_write.sum
ncu --profile-from-start off --clock-control none --cache-control none --csv --page raw --print-units base \
  --metrics "$metrics" --log-file "$out.csv" \
  python3 "$here/steps.py" --profile --layers 8 --batch 8 --context 8192 "$@" | tee "$out.txt"
python3 "$here/ncu_table.py" "$out.csv" "$out.txt" "$out"
