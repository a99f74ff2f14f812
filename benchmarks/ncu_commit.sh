#!/usr/bin/env bash
# DRAM and L2 writes of both schemes at acceptance 0, 30, 70 and 100 %, by Nsight Compute.
#
#   benchmarks/ncu_commit.sh [FILE.json]      prints the table, writes FILE.json if given
exec "$(dirname "${BASH_SOURCE[0]}")/ncu_ranges.sh" ncu_commit "$@"
