#pragma once

#include <cuda.h>

#include <type_traits>

#include "attention/cuda/ptx.cuh"
#include "attention/cuda/row_depth.cuh"
#include "attention/cuda/sm90/warpgroup.cuh"
#include "attention/params.h"
#include "attention/plan.h"
#include "attention/tile_shape.h"

namespace nwor {

// What one kernel is compiled for.
//   T        the rows' type: query, key, value, out
//   kFloat8_ whether the pages hold float8 (then the products are computed in half)
template <typename T, bool kFloat8_, int kHeadDim_, int kRowTile_>
struct VerifyTraits {
  using Row = T;
  using Product = std::conditional_t<kFloat8_, __half, T>;

  static constexpr bool kSuperseded = wgmma::kAvailable && !kFloat8_;  // by tile_kernel.cuh
  static constexpr bool kFloat8 = kFloat8_;
  static constexpr bool kTwoRows = false;
  static constexpr bool kSplitQuads = false;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowTile = kRowTile_;
  static constexpr int kWarpRows = WarpRows(kHeadDim, kRowTile);
  static constexpr int kRowSplits = RowSplits(kHeadDim, kRowTile);
  static constexpr int kThreads = CtaThreads(kHeadDim, kRowTile);
  static constexpr int kCtasPerSm = kThreads == 32 * kStreams ? 2 : 1;
  static constexpr bool kStartsEarly = StartsLeavesEarly(kRowTile);

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

  __device__ static void Meet() { __syncthreads(); }
};

// 16-byte chunks of a row are stored at chunk ^ Swizzle(row): eight consecutive rows then lie in
// eight distinct bank groups for every supported row length.
template <int kRowBytes>
struct RowSwizzle {
  static constexpr int kChunks = kRowBytes / 16;
  static constexpr int kShift = kChunks % 8 == 0 ? 0 : kChunks % 4 == 0 ? 1 : 2;
  static constexpr int kMask = kChunks % 8 == 0   ? 7
                               : kChunks % 4 == 0 ? 3
                               : kChunks % 2 == 0 ? 1
                                                  : 0;

  __device__ static constexpr int Of(int row) { return (row >> kShift) & kMask; }
  __device__ static constexpr int Offset(int row, int chunk) {
    return row * kRowBytes + ((chunk ^ Of(row)) << 4);
  }
  // The address `chunk` chunks on from `address` = base + Offset(row, c), where c and chunk have no
  // bit in common and base is a multiple of 128. One xor with a constant: nothing to keep in
  // registers.
  __device__ static constexpr uint32_t Advance(uint32_t address, int chunk) {
    return (address ^ ((chunk & kMask) << 4)) + (chunk & ~kMask) * 16;
  }
};

// Division of 0 <= n < 2^31 by a number found at run time, as a multiplication.
struct Divisor {
  uint32_t value = 1, factor = 0x80000001u, shift = 31;

  static Divisor Of(int value) {
    Divisor d;
    d.value = value;
    while ((1ull << (d.shift - 31)) < d.value) ++d.shift;
    d.factor = static_cast<uint32_t>((1ull << d.shift) / d.value + 1);
    return d;
  }
  __device__ int Quotient(int n) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(n)) * factor >> shift);
  }
};

// Everything a launch knows.
struct VerifyArgs {
  // Keys and values of the pages, then of the compact view, for tile kernels.
  CUtensorMap maps[4];
  VerifyParams params;
  const PlanHeader* plan;
  const PlanItem* items;
  const PlanItem* pairs;
  WorkCounters* counters;
  float2* states;
  float* outputs;
  Divisor page_tokens, block_tokens, blocks_per_page, group;
  int32_t stages, early_stages;
  int32_t max_slots;
  int32_t row_tile;  // rows of a slot
};

// The launches of one combination of types and head size: defined in verify_launch.cuh.
template <typename T, bool kFloat8, int kHeadDim>
struct VerifyLauncher {
  static void Launch(const VerifyArgs& args, const VerifyConfig& config);
  // Whether the kernel for warpgroup matrix instructions was built for the current device.
  static bool HasWarpgroupKernel();
};

// Where the prefix tokens of the current item lie; distances in bytes.
struct TokenMap {
  const char* keys;
  const char* values;
  int64_t key_page, value_page;
  int64_t key_token, value_token;
  const int32_t* ids;  // of pages or blocks; null: contiguous
  Divisor unit_tokens;
  Divisor units_per_page;
  int64_t num_pages;
};

// What a CTA knows of the launch. Read before it asks for an item.
struct LaunchCounts {
  int num_items = 0;
  int num_split_pairs = 0;  // that leave partial results
  int max_parts = 0;        // of a pair
  uint32_t fetch_base = 0;  // see WorkCounters
  uint32_t launch = 0;

  __device__ void Read(const VerifyArgs& args) {
    num_items = args.plan->num_items;
    num_split_pairs = args.plan->num_split_pairs;
    max_parts = args.plan->max_parts;
    fetch_base = args.counters->fetch_base;
    launch = args.counters->launch;
  }
};

// What follows an item.
struct QueueEnd {
  LaunchCounts counts;
  int32_t next_item;
  uint32_t ticket;  // of the combine; then the item's plan is the pair's
};

// The current item, in shared memory.
struct SharedItem {
  PlanItem plan;
  union {
    TokenMap tokens;
    QueueEnd queue;  // when the tokens are no longer needed
  };
  int32_t is_end;      // no item: there are no more
  float prefix_scale;  // of a raw score, log2 units: scale, key scale and log2(e)
  float tail_scale;
  float value_scale;
  float cap_inner;  // softcap: cap_outer * tanh(x), x = cap_inner * scaled score / 2, log2 units
  float cap_outer;  // 0: no softcap
};
static_assert(sizeof(SharedItem) + sizeof(uint64_t) * kStreams <= kItemBytes &&
              sizeof(SharedItem) <= kTileItemBytes);
static_assert(sizeof(SharedItem) % alignof(uint64_t) == 0, "barriers stand behind it");

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

// The dynamic shared memory of a CTA. Between leaves the merge buffer takes the place of the stages
// behind those that are filled early.
template <class Traits>
struct SharedMemory {
  SharedItem* item;
  uint64_t* barriers;  // of the streams, unused where they have one warp each
  RowStates<Traits::kRowTile>* rows;
  uint8_t* query;
  float4* group;  // see FoldBytes
  uint8_t* stages;
  float* merge;

  __device__ SharedMemory(uint8_t* base, const VerifyArgs& args) {
    item = reinterpret_cast<SharedItem*>(base);
    barriers = reinterpret_cast<uint64_t*>(item + 1);
    query = base + kItemBytes;
    rows = reinterpret_cast<RowStates<Traits::kRowTile>*>(
        query + QueryBytes(Traits::kHeadDim, Traits::kRowTile));
    group = reinterpret_cast<float4*>(reinterpret_cast<uint8_t*>(rows) +
                                      RowStateBytes(Traits::kRowTile));
    stages = reinterpret_cast<uint8_t*>(group) + FoldBytes(Traits::kHeadDim, Traits::kRowTile);
    const int early = Traits::kStartsEarly ? args.early_stages : 0;
    merge = reinterpret_cast<float*>(stages + early * kStreams * Traits::kStageBytes);
  }
};

}  // namespace nwor
