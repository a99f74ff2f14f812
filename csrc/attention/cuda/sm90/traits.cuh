#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "attention/cuda/ptx.cuh"
#include "attention/cuda/sm90/tile_shape.h"

namespace nwor::sm90 {

// What one sm_90a kernel is compiled for: see sm80::Traits.
//   kFloat8_      whether the pages hold float8; the products are then computed in half
//   kWarpgroups_  consumer warpgroups
//   kHalves_      halves of a warp's 16 rows that are used: see RowHalves
template <typename T, bool kFloat8_, int kHeadDim_, int kWarpgroups_, int kHalves_>
struct Traits {
  using Element = T;
  using MmaElement = std::conditional_t<kFloat8_, __half, T>;

  static constexpr bool kIsBuilt = ptx::kHasWgmma;
  static constexpr bool kFloat8 = kFloat8_;
  static constexpr int kHalves = kHalves_;
  static constexpr bool kTwoRows = kHalves == 2;     // see CombinedRows
  static constexpr bool kSplitQuads = kHalves == 1;  // see CombinedRows
  static constexpr bool kQueryInRegisters = QueryInRegisters(kHeadDim_);
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kRowTile = kWarpgroups * kWarpgroupRows / 2 * kHalves;  // at most
  static constexpr int kQueryRows = QueryRows(kHeadDim, kRowTile);
  static constexpr int kThreads = ConsumerThreads(kWarpgroups);
  static constexpr int kStepTokens = StepTokens(kHeadDim);
  static constexpr int kKvTileBytes = KvTileBytes(kHeadDim);  // K or V of a step
  static constexpr int kStageBytes = 2 * kKvTileBytes;
  static constexpr int kRawTileBytes = kFloat8 ? RawTileBytes(kHeadDim) : 0;
  static_assert(!kFloat8 || (TakesFloat8(kHeadDim) && kWarpgroups == 1));
  // The widest swizzle atom that divides a row.
  static constexpr int kAtomBytes = kHeadDim % 64 == 0 ? 128 : kHeadDim % 32 == 0 ? 64 : 32;
  static constexpr int kAtoms = kHeadDim * 2 / kAtomBytes;
  static constexpr int kAtomStride = kStepTokens * kAtomBytes;  // between atoms side by side

  // A barrier for the consumer threads.
  __device__ static void Sync() { ptx::NamedBarrier(1, kThreads); }
};

// A position in a circular buffer of `size` entries, and the parity of the pass over it.
struct PipelineState {
  int index = 0;
  uint32_t phase = 0;

  __device__ void Advance(int size) {
    if (++index == size) {
      index = 0;
      phase ^= 1;
    }
  }
};

}  // namespace nwor::sm90
