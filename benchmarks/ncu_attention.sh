#!/usr/bin/env bash
# DRAM bytes that verify attention reads beside the K/V it has to read, by Nsight Compute.
#
#   benchmarks/ncu_attention.sh [FILE.json]      prints the table, writes FILE.json if given
exec "$(dirname "${BASH_SOURCE[0]}")/ncu_ranges.sh" ncu_attention "$@"
