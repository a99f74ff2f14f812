#pragma once

// Shared memory that a warp needs to combine partial results (combine.cuh). The kernels and the
// tests of the heuristics share it.

namespace nwor {

// A warp combines one or two `rows` of an output tile at a time. Bytes of one partial output (16
// bytes per lane), of the states of up to 32 partials, and of their merge weights.
constexpr int CombinePartialBytes(int head_dim, int rows) {
  return (head_dim * rows / 4 + 31) / 32 * 512;
}
constexpr int CombineStateBytes(int rows) { return 32 * 8 * rows; }
constexpr int CombineWeightBytes(int rows) { return 32 * 16 * rows; }

// Bytes that a warp needs to combine `partials` partial results at once.
constexpr int CombineWarpBytes(int head_dim, int rows, int partials) {
  return CombineWeightBytes(rows) + CombineStateBytes(rows) +
         partials * CombinePartialBytes(head_dim, rows);
}

}  // namespace nwor
