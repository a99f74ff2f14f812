#pragma once

#include "attention/cuda/kernel_args.cuh"
#include "attention/cuda/ptx.cuh"
#include "attention/cuda/row_depth.cuh"
#include "attention/cuda/sm90/traits.cuh"

// The mask: which tokens of a step the rows of a tile see. The consumers mask scores with it; the
// boundary producer loads the words of the tree mask.

namespace nwor::sm90 {

// The words of the tree mask for a step of in-flight rows: one for each of the work tile's query
// rows [first, first + count). The boundary producer loads them with the step's tokens, whose
// latency hides theirs, unless there are too many for a stage.
struct StageMask {
  int first, count;

  __device__ StageMask(const VerifyArgs& args, const WorkTile& work_tile)
      : first(args.group.Quotient(work_tile.row_begin)),
        count(args.group.Quotient(work_tile.row_begin + work_tile.num_rows - 1) - first + 1) {}
  __device__ bool fits() const { return count <= kStageMaskRows; }
  // The word of query row `row` that holds in-flight row `other`, in global memory.
  __device__ static const uint64_t* Word(const VerifyParams& p, const WorkTile& work_tile, int row,
                                         int other) {
    return p.tree_mask + int64_t{work_tile.query_start + row} * p.mask_words + other / 64;
  }
};

// The row of the tile that this thread holds in the upper (0) or lower (1) half of its warp's rows.
template <class Traits>
__device__ int TileRow(int half) {
  return threadIdx.x / 32 * (8 * Traits::kHalves) + half * 8 + threadIdx.x % 32 / 4;
}

// Bits 0 .. count-1; count may lie outside 0..64.
__device__ inline uint64_t LowBits(int count) {
  return count <= 0 ? 0ull : count >= 64 ? ~0ull : (1ull << count) - 1;
}

// What the mask of a step depends on.
struct StepMask {
  bool in_flight;
  int first, end;  // the first prefix token or in-flight row; from `end` on there are none
  uint32_t words;  // address of the stage's words of the tree mask
};

// Bit j of visible[half]: this thread's row of that half, at position[half], sees token j of the
// step. Called by whole warps.
template <class Traits>
__device__ void VisibleTokens(const VerifyArgs& args, const WorkTile& work_tile,
                              const int (&position)[Traits::kHalves], const StepMask& step,
                              uint64_t (&visible)[Traits::kHalves]) {
  const VerifyParams& p = args.params;
  const int first = step.first;
  const int last_row = work_tile.request_rows - 1;
  const int lane = threadIdx.x % 32;
  const bool windowed_rows = step.in_flight && p.window > 0;
  int depth[2] = {0, 0};  // of key rows first + lane and + 32
  if (windowed_rows) {
    depth[0] = RowDepth(p, work_tile, min(first + lane, last_row));
    depth[1] = RowDepth(p, work_tile, min(first + lane + 32, last_row));
  }
#pragma unroll
  for (int half = 0; half < Traits::kHalves; ++half) {
    visible[half] = LowBits(step.end - first);
    if (!step.in_flight) {
      if (p.window > 0) visible[half] &= ~LowBits(position[half] - p.window + 1 - first);
      continue;
    }
    // Rows that do not exist may have any mask.
    const StageMask mask(args, work_tile);
    const int row =
        min(args.group.Quotient(work_tile.row_begin + TileRow<Traits>(half)) - mask.first,
            mask.count - 1);
    if (p.tree_mask == nullptr) {
      visible[half] &= LowBits(mask.first + row + 1 - first);
    } else {
      // The rows of a step share a mask word: steps start at multiples of 32 or 64.
      uint64_t word;
      if (mask.fits()) {
        word = ptx::Bits<uint64_t>(ptx::LoadShared64(step.words + row * 8));
      } else {
        word = *StageMask::Word(p, work_tile, mask.first + row, first);
      }
      visible[half] &= word >> (first % 64);
    }
    if (windowed_rows) {
      const int oldest = position[half] - work_tile.prefix_tokens - p.window + 1;
#pragma unroll 1
      for (int j = 0; j < Traits::kStepTokens; ++j) {
        const int other = __shfl_sync(0xffffffffu, j < 32 ? depth[0] : depth[1], j % 32);
        if (other < oldest) visible[half] &= ~(1ull << j);
      }
    }
  }
}

}  // namespace nwor::sm90
