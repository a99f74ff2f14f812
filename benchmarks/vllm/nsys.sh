#!/usr/bin/env bash
# A timeline of vLLM with the plugin: our NVTX ranges (nwor.stage, nwor.commit, nwor.attend) between vLLM's kernels.
#   benchmarks/vllm/nsys.sh [arguments of offline.py]      writes nwor_vllm.nsys-rep here
set -euo pipefail
command -v nsys >/dev/null || { echo "nsys not found: install Nsight Systems" >&2; exit 1; }
exec nsys profile --force-overwrite=true --trace=cuda,nvtx --cuda-graph-trace=node --sample=none --output=nwor_vllm \
  python "$(dirname "${BASH_SOURCE[0]}")/offline.py" --runs 1 --tokens 32 "$@"
