#pragma once

#include <type_traits>

#include "attention/params.h"
#include "attention/plan.h"
#include "attention/ptx.cuh"
#include "attention/tile_shape.h"

namespace nwor {

// What one kernel is compiled for.
//   T        the rows' type: query, key, value, out
//   kFloat8_ whether the pages hold float8 (then the products are computed in half)
template <typename T, bool kFloat8_, int kHeadDim_, int kRowTile_>
struct VerifyTraits {
  using Row = T;
  using Product = std::conditional_t<kFloat8_, __half, T>;

  static constexpr bool kFloat8 = kFloat8_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowTile = kRowTile_;
  static constexpr int kWarpRows = WarpRows(kHeadDim, kRowTile);
  static constexpr int kRowSplits = RowSplits(kHeadDim, kRowTile);
  static constexpr int kThreads = CtaThreads(kHeadDim, kRowTile);
  static constexpr int kCtasPerSm = kThreads == 32 * kStreams ? 2 : 1;

  static constexpr int kStepTokens = StepTokens(kHeadDim, kFloat8);
  // Of a step of 16-bit tokens: in-flight rows and compact views keep the rows' type.
  static constexpr int kTailTokens = kFloat8 ? 16 : kStepTokens;
  static constexpr int kStageBytes = StageBytes(kHeadDim, kFloat8);
  static constexpr int kCacheRowBytes = kHeadDim * (kFloat8 ? 1 : 2);
  static constexpr int kRowBytes = kHeadDim * 2;

  static constexpr int kRowFragments = kWarpRows / 16;
  static constexpr int kTokenFragments = kStepTokens / 8;
  static constexpr int kInnerSteps = kHeadDim / 16;

  // Queries stay in registers where the outputs leave room for them.
  static constexpr bool kQueryInRegisters = kRowFragments == 1 && kHeadDim <= 128;
  static constexpr int kMergeStride = kHeadDim + 8;  // floats; keeps four rows in distinct banks
};

// 16-byte chunks of a row are stored at chunk ^ Swizzle(row): eight consecutive rows then lie in
// eight distinct bank groups for every supported row length.
template <int kRowBytes>
__device__ inline constexpr int Swizzle(int row) {
  constexpr int kChunks = kRowBytes / 16;
  if constexpr (kChunks % 8 == 0) return row & 7;
  if constexpr (kChunks % 4 == 0) return (row >> 1) & 3;
  if constexpr (kChunks % 2 == 0) return (row >> 2) & 1;
  return 0;
}

template <int kRowBytes>
__device__ inline constexpr int ChunkOffset(int row, int chunk) {
  return row * kRowBytes + ((chunk ^ Swizzle<kRowBytes>(row)) << 4);
}

// Everything a launch knows.
struct VerifyArgs {
  VerifyParams params;
  const PlanHeader* plan;
  const PlanItem* items;
  WorkCounters* counters;
  int32_t* arrivals;
  int32_t* ready;
  float2* states;
  float* outputs;
  int32_t stages;
  int32_t max_slots;
};

// Rows that a row sees besides itself: its depth in the tree, its distance behind the prefix.
__device__ inline int RowDepth(const VerifyParams& p, int query_start, int row) {
  if (p.tree_mask == nullptr) return row;
  const uint64_t* mask = p.tree_mask + int64_t{query_start + row} * p.mask_words;
  int visible = 0;
  for (int w = 0; w < p.mask_words; ++w) visible += __popcll(mask[w]);
  return visible - 1;
}

// Where the prefix tokens of the current item lie; distances in bytes.
struct TokenMap {
  const char* keys;
  const char* values;
  int64_t key_page, value_page;
  int64_t key_token, value_token;
  const int32_t* ids;  // of pages or blocks; null: contiguous
  int32_t unit_tokens;
  int32_t units_per_page;
  int64_t num_pages;
};

// The current item, in shared memory.
struct SharedItem {
  PlanItem plan;
  TokenMap tokens;
  int32_t next_item;
  int32_t decision;
  float prefix_scale;  // of a raw score, log2 units: scale, key scale and log2(e)
  float tail_scale;
  float value_scale;
};
static_assert(sizeof(SharedItem) <= kItemBytes);

// Per row: softmax states of the streams, weights of the merges, position.
template <int kRowTile>
struct RowStates {
  float max[kStreams][kRowTile];
  float sum[kStreams][kRowTile];
  float weight[kStreams][kRowTile];
  float2 group[kRowTile];         // max, sum of the leaves folded so far
  float2 total[kRowTile];         // of the groups folded so far
  float2 group_weight[kRowTile];  // old, new
  float2 total_weight[kRowTile];
  float inverse_sum[kRowTile];
  int32_t position[kRowTile];
};
static_assert(sizeof(RowStates<16>) == RowStateBytes(16));

// The dynamic shared memory of a CTA. The merge buffer takes the stages' place between leaves.
template <class Traits>
struct SharedMemory {
  SharedItem* item;
  RowStates<Traits::kRowTile>* rows;
  uint8_t* query;
  uint8_t* stages;
  float* merge;

  __device__ explicit SharedMemory(uint8_t* base) {
    item = reinterpret_cast<SharedItem*>(base);
    query = base + kItemBytes;
    rows = reinterpret_cast<RowStates<Traits::kRowTile>*>(
        query + QueryBytes(Traits::kHeadDim, Traits::kRowTile));
    stages = reinterpret_cast<uint8_t*>(rows) + RowStateBytes(Traits::kRowTile);
    merge = reinterpret_cast<float*>(stages);
  }
};

}  // namespace nwor
