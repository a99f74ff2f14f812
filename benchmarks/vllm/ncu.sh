#!/usr/bin/env bash
# DRAM and L2 writes of a verification step's kernels, with and without the plugin, by Nsight Compute.
#   benchmarks/vllm/ncu.sh [arguments of offline.py]       prints one line per kernel name
# Eager, because a replayed graph is one node to the profiler; few tokens, because every kernel is replayed.
set -euo pipefail
command -v ncu >/dev/null || { echo "ncu not found: install Nsight Compute" >&2; exit 1; }
metrics=dram__bytes_write.sum,dram__bytes_read.sum,lts__t_sectors_op_write.sum
exec ncu --csv --page raw --metrics "$metrics" --target-processes all \
  --kernel-name-base demangled --kernel-name 'regex:(Stage|Commit|Verify|Group|reshape_and_cache|flash)' --launch-count 4000 \
  python "$(dirname "${BASH_SOURCE[0]}")/offline.py" --eager --runs 1 --tokens 8 "$@"
