#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "attention/cuda/kernel_args.cuh"
#include "attention/cuda/ptx.cuh"
#include "attention/cuda/sm80/tile_shape.h"
#include "attention/cuda/sm90/tile_shape.h"

namespace nwor::sm80 {

// What one sm_80 kernel is compiled for.
//   T        type of the rows: query, key, value, out
//   kFloat8_ whether the pages hold float8; the products are then computed in half
template <typename T, bool kFloat8_, int kHeadDim_, int kRowTile_>
struct Traits {
  using Element = T;
  using MmaElement = std::conditional_t<kFloat8_, __half, T>;

  // Where the library is built for sm_90a, sm90/kernel.cuh takes the other caches.
  static constexpr bool kIsBuilt = !ptx::kHasWgmma || (kFloat8_ && !sm90::TakesFloat8(kHeadDim_));
  static constexpr bool kFloat8 = kFloat8_;
  static constexpr bool kTwoRows = false;     // see CombinedRows
  static constexpr bool kSplitQuads = false;  // see CombinedRows
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowTile = kRowTile_;
  static constexpr int kWarpRows = WarpRows(kHeadDim, kRowTile);
  static constexpr int kQueryWarps = QueryWarps(kHeadDim, kRowTile);
  static constexpr int kThreads = CtaThreads(kHeadDim, kRowTile);
  static constexpr int kCtasPerSm = kThreads == 32 * kKvWarps ? 2 : 1;
  static constexpr bool kPrefetchesNextSplit = PrefetchesNextSplit(kRowTile);

  static constexpr int kStepTokens = StepTokens(kHeadDim, kFloat8);
  // Tokens of a step of 16-bit tokens: in-flight rows and compact views keep the rows' type.
  static constexpr int kInFlightStepTokens = kFloat8 ? 16 : kStepTokens;
  static constexpr int kStageBytes = StageBytes(kHeadDim, kFloat8);
  static constexpr int kCacheRowBytes = kHeadDim * (kFloat8 ? 1 : 2);
  static constexpr int kRowBytes = kHeadDim * 2;

  static constexpr int kRowFragments = kWarpRows / 16;
  static constexpr int kTokenFragments = kStepTokens / 8;
  static constexpr int kInnerSteps = kHeadDim / 16;

  // Queries stay in registers where the outputs leave room for them.
  static constexpr bool kQueryInRegisters = kRowFragments == 1 && kHeadDim <= 128;
  static constexpr int kMergeStride = kHeadDim + 8;  // floats; keeps four rows in distinct banks

  // A barrier for the CTA.
  __device__ static void Sync() { __syncthreads(); }
};

// Per row: softmax states of the KV warps, weights of the merges, position.
template <int kRowTile>
struct RowStates {
  float max[kKvWarps][kRowTile];
  float sum[kKvWarps][kRowTile];
  float weight[kKvWarps][kRowTile];
  float2 group[kRowTile];         // max and sum of the current group's splits so far
  float2 total[kRowTile];         // max and sum of the groups so far
  float2 group_weight[kRowTile];  // old, new
  float2 total_weight[kRowTile];
  float inverse_sum[kRowTile];
  int32_t position[kRowTile];
};
static_assert(sizeof(RowStates<16>) == RowStateBytes(16));
static_assert(sizeof(SharedWorkTile) + sizeof(uint64_t) * kKvWarps <= kWorkTileBytes);
static_assert(sizeof(SharedWorkTile) % alignof(uint64_t) == 0, "barriers follow it");

// The dynamic shared memory of a CTA. Between splits the merge buffer takes the place of the stages
// after those that are prefetched.
template <class Traits>
struct SharedStorage {
  SharedWorkTile* work_tile;
  uint64_t* barriers;  // one per KV warp; unused if there is one query warp
  RowStates<Traits::kRowTile>* rows;
  uint8_t* query;
  float4* group;  // see GroupOutputBytes
  uint8_t* stages;
  float* merge;

  __device__ SharedStorage(uint8_t* base, const VerifyArgs& args) {
    work_tile = reinterpret_cast<SharedWorkTile*>(base);
    barriers = reinterpret_cast<uint64_t*>(work_tile + 1);
    query = base + kWorkTileBytes;
    rows = reinterpret_cast<RowStates<Traits::kRowTile>*>(
        query + QueryBytes(Traits::kHeadDim, Traits::kRowTile));
    group = reinterpret_cast<float4*>(reinterpret_cast<uint8_t*>(rows) +
                                      RowStateBytes(Traits::kRowTile));
    stages =
        reinterpret_cast<uint8_t*>(group) + GroupOutputBytes(Traits::kHeadDim, Traits::kRowTile);
    const int prefetched = Traits::kPrefetchesNextSplit ? args.prefetch_stages : 0;
    merge = reinterpret_cast<float*>(stages + prefetched * kKvWarps * Traits::kStageBytes);
  }
};

}  // namespace nwor::sm80
