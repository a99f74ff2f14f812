#pragma once

#include "attention/cuda/sm90/tile_memory.cuh"

// Which tokens of a step the rows of a tile see.

namespace nwor {

// Row of the tile that this thread has in the upper (0) or lower (1) half of its warp's.
template <class Traits>
__device__ int TileRow(int half) {
  return threadIdx.x / 32 * (8 * Traits::kHalves) + half * 8 + threadIdx.x % 32 / 4;
}

// Bits 0 .. count-1; count may lie outside 0..64.
__device__ inline uint64_t LowBits(int count) {
  return count <= 0 ? 0ull : count >= 64 ? ~0ull : (1ull << count) - 1;
}

// A step as the computing threads see it.
struct StepSight {
  bool in_flight;
  int first, end;  // its first prefix token or in-flight row; from `end` on there are none
  uint32_t mask;   // of its stage
};

// Bit j of seen: this thread's row of that half, at position[half], sees token j of the step.
// Called by whole warps.
template <class Traits>
__device__ void SeenTokens(const VerifyArgs& args, const PlanItem& item,
                           const int (&position)[Traits::kHalves], const StepSight& step,
                           uint64_t (&seen)[Traits::kHalves]) {
  const VerifyParams& p = args.params;
  const int first = step.first;
  const int last_row = item.request_rows - 1;
  const int lane = threadIdx.x % 32;
  const bool windowed_rows = step.in_flight && p.window > 0;
  int depth[2] = {0, 0};  // of key rows first + lane and + 32
  if (windowed_rows) {
    depth[0] = RowDepth(p, item, min(first + lane, last_row));
    depth[1] = RowDepth(p, item, min(first + lane + 32, last_row));
  }
#pragma unroll
  for (int half = 0; half < Traits::kHalves; ++half) {
    seen[half] = LowBits(step.end - first);
    if (!step.in_flight) {
      if (p.window > 0) seen[half] &= ~LowBits(position[half] - p.window + 1 - first);
      continue;
    }
    // Rows that do not exist may see anything.
    const StageMask mask(args, item);
    const int row = min(args.group.Quotient(item.row_begin + TileRow<Traits>(half)) - mask.first,
                        mask.count - 1);
    if (p.tree_mask == nullptr) {
      seen[half] &= LowBits(mask.first + row + 1 - first);
    } else {
      // A step's rows lie in one mask word: steps start at multiples of 32 or 64.
      uint64_t word;
      if (mask.fits()) {
        word = ptx::Bits<uint64_t>(ptx::LoadShared64(step.mask + row * 8));
      } else {
        word = *StageMask::Word(p, item, mask.first + row, first);
      }
      seen[half] &= word >> (first % 64);
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
