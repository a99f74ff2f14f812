#pragma once

#include "attention/tile_memory.cuh"

// Which tokens of a step the rows of a tile see.

namespace nwor {

// Row of the tile that this thread has in the upper (0) or lower (1) half of its warp's 16.
__device__ inline int TileRow(int half) {
  return threadIdx.x / 32 * 16 + half * 8 + threadIdx.x % 32 / 4;
}

// Bits 0 .. count-1; count may lie outside 0..64.
__device__ inline uint64_t LowBits(int count) {
  return count <= 0 ? 0ull : count >= 64 ? ~0ull : (1ull << count) - 1;
}

// Bit j of seen: this thread's row of that half, at position[half], sees token j of the step whose
// first prefix token or in-flight row is `first`; from `end` on there are none. Called by whole
// warps.
template <class Traits>
__device__ void SeenTokens(const VerifyArgs& args, const PlanItem& item, const int (&position)[2],
                           bool in_flight, int first, int end, uint64_t (&seen)[2]) {
  const VerifyParams& p = args.params;
  const int last_row = item.request_rows - 1;
  const int lane = threadIdx.x % 32;
  const bool windowed_rows = in_flight && p.window > 0;
  int depth[2] = {0, 0};  // of key rows first + lane and + 32
  if (windowed_rows) {
    depth[0] = RowDepth(p, item, min(first + lane, last_row));
    depth[1] = RowDepth(p, item, min(first + lane + 32, last_row));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    seen[half] = LowBits(end - first);
    if (!in_flight) {
      if (p.window > 0) seen[half] &= ~LowBits(position[half] - p.window + 1 - first);
      continue;
    }
    const int query_row = min(args.group.Quotient(item.row_begin + TileRow(half)), last_row);
    if (p.tree_mask == nullptr) {
      seen[half] &= LowBits(query_row + 1 - first);
    } else {
      // A step's rows lie in one mask word: steps start at multiples of 32 or 64.
      const int64_t at = item.query_start + query_row;
      seen[half] &= p.tree_mask[at * p.mask_words + first / 64] >> (first % 64);
    }
    if (windowed_rows) {
      const int oldest = position[half] - item.prefix_tokens - p.window + 1;
#pragma unroll 1
      for (int j = 0; j < Traits::kStepTokens; ++j) {
        const int other = __shfl_sync(0xffffffffu, j < 32 ? depth[0] : depth[1], j % 32);
        if (other < oldest) seen[half] &= ~(1ull << j);
      }
    }
  }
}

}  // namespace nwor
