#pragma once

#include <cstdint>

#include "attention/cuda/sm90/tile_shape.h"
#include "base/export.h"
#include "base/types.h"

// How one verification step runs on a CUDA device: which kernel, how many CTAs, how much memory,
// and how prefixes are split. The functions are pure: they take sizes that the host knows, read no
// device memory and need no CUDA. Thread-safe.
//
//   split          a range of one request's prefix tokens that is attended with its own softmax
//                  state, as in split-KV (FlashAttention's num_splits)
//   split group    consecutive splits whose states are merged first
//   output tile    one request, one KV head, one row tile of packed rows (rows * query heads)
//   work tile      what a CTA takes from the queue: one split, one split group or all splits of an
//                  output tile
//
// Two callers: attention/verify.cpp asks ChooseVerifyConfig once per call; the planner kernel
// (cuda/plan.cu) calls SplitRequest and ChooseGranularity on the device with the actual lengths.

namespace nwor {

// Sizes of one step. Lengths live on the device and are not part of it.
struct VerifyShape {
  int32_t num_requests = 0;              // B
  int32_t num_rows = 0;                  // T, rows of all requests
  int32_t num_heads = 0;                 // Hq
  int32_t num_kv_heads = 0;              // Hkv
  int32_t head_dim = 0;                  // D
  DType dtype = DType::kBFloat16;        // of query, key, value, out
  DType cache_dtype = DType::kBFloat16;  // dtype or float8
  int32_t page_size = 16;
  int32_t block_size = 0;  // of a partial view; 0: none
  // Rows of a typical request; chooses the row tile. 0: T / B. Affects speed only.
  int32_t rows_hint = 0;
  // No request attends to more prefix tokens, as the host knows it from the sizes of tables and
  // views. Chooses the number of CTAs, neither a split nor a size of memory. 0: unknown.
  int64_t max_prefix_tokens = 0;
};

struct DeviceProps {
  int32_t num_sms = 0;
  int32_t compute_capability = 0;    // 80, 89, 90, ...
  int32_t smem_per_block_bytes = 0;  // with opt-in
  int32_t smem_per_sm_bytes = 0;
  bool warpgroup_mma = false;  // sm_90, and the library was built for sm_90a
};

// The shape of one launch. row_tile, stages and num_ctas change speed but never a bit of the
// result. The kernel (`warpgroup`) and the splits do change bits; they depend only on the device,
// the model and the request itself.
struct VerifyConfig {
  const char* unsupported = nullptr;  // what is missing; null: the kernels support this shape
  bool warpgroup = false;             // the sm_90a kernel (wgmma, TMA) instead of the sm_80 one
  int32_t row_tile = 0;               // packed rows per work tile
  int32_t stages = 0;                 // pipeline stages (sm_80: of each KV warp)
  int32_t prefetch_stages = 0;        // stages filled for the next split during a merge; sm_80 only
  int32_t raw_stages = 0;             // stages of float8 tokens as they are loaded; sm_90a only
  int32_t num_ctas = 0;               // persistent CTAs: they fill the device once
  int32_t max_ctas = 0;               // the most for this shape; sizes of memory hold for them
  int32_t smem_bytes = 0;             // dynamic shared memory of a CTA
  int32_t max_smem_bytes = 0;         // the most on this device, whatever the shape
  int32_t min_split_tokens = 0;       // a split has at least this many tokens
  int32_t max_splits = 0;             // a prefix has at most this many splits
  int32_t fill_splits = 0;  // splits per KV head with which one request fills every SM once
  // Requests with more packed rows than one warpgroup holds are split by SplitWidePrefix over at
  // most this many CTAs. 0: they are split like the others.
  int32_t wide_ctas = 0;
  int32_t max_output_tiles = 0;  // upper bound of the output tiles of a step
  int32_t max_slots = 0;         // partial results that the workspace holds
  int32_t max_work_tiles = 0;    // work tiles that a plan holds
};

// The splits of a prefix. They depend only on the request's own tokens and rows and on constants of
// the device and the model, so a request's result does not depend on the batch.
struct PrefixSplits {
  int32_t split_tokens = 0;  // tokens of a split, a multiple of kSplitAlign
  int32_t num_splits = 1;    // at least 1: the last split also takes the in-flight rows
};
inline constexpr int32_t kSplitAlign = 64;

// Splits `tokens` prefix tokens. If the count lies between fill_splits and reach * fill_splits, it
// is reduced to fill_splits: otherwise a few CTAs would work on two splits and most on one, and the
// end of every split costs time.
constexpr PrefixSplits SplitPrefix(int32_t tokens, int32_t min_split_tokens, int32_t max_splits,
                                   int32_t fill_splits = 0, int32_t reach = 1) {
  const int64_t span = tokens;
  int64_t splits = (span + min_split_tokens - 1) / min_split_tokens;
  if (splits > fill_splits && splits <= int64_t{reach} * fill_splits) splits = fill_splits;
  splits = splits < 1 ? 1 : (splits > max_splits ? max_splits : splits);
  int64_t size = (span + splits - 1) / splits;
  size = (size + kSplitAlign - 1) / kSplitAlign * kSplitAlign;
  size = size < kSplitAlign ? kSplitAlign : size;
  const int64_t count = (span + size - 1) / size;
  return {static_cast<int32_t>(size), static_cast<int32_t>(count < 1 ? 1 : count)};
}

// Splits the prefix of a request with more packed rows than one warpgroup holds. Such a request is
// compute-bound and merging costs time, so it gets few, long splits: over its `output_tiles` at
// most one work tile for each of `ctas` CTAs.
inline constexpr int32_t kMinWideSplitTokens = 384;
inline constexpr int32_t kMaxWideSplits = 128;
constexpr PrefixSplits SplitWidePrefix(int32_t tokens, int32_t output_tiles, int32_t ctas) {
  const int32_t most = ctas > output_tiles ? ctas / output_tiles : 1;
  return SplitPrefix(tokens, kMinWideSplitTokens, most < kMaxWideSplits ? most : kMaxWideSplits);
}

// Splits a request by its number of packed rows. With more than half a warpgroup of rows the sm_90a
// kernel runs two CTAs per SM even for one request (head sizes up to 128), so the smaller `reach`
// leaves enough splits for both.
constexpr PrefixSplits SplitRequest(int32_t tokens, int32_t packed_rows, int32_t kv_heads,
                                    const VerifyConfig& config) {
  if (config.wide_ctas > 0 && packed_rows > sm90::kWarpgroupRows) {
    const int32_t tiles = (packed_rows + 2 * sm90::kWarpgroupRows - 1) / (2 * sm90::kWarpgroupRows);
    return SplitWidePrefix(tokens, tiles * kv_heads, config.wide_ctas);
  }
  const int32_t reach = config.warpgroup && packed_rows > sm90::kWarpgroupRows / 2 ? 2 : 4;
  return SplitPrefix(tokens, config.min_split_tokens, config.max_splits, config.fill_splits, reach);
}

// How many splits one work tile takes. Coarse work tiles leave few partial results; fine ones
// balance the load. The result is the same: states are merged in the same order either way.
enum class WorkGranularity : int32_t { kSplit, kSplitGroup, kRequest };

// Splits per split group. A request has up to four groups, or eight if it has more than 24 splits.
// Kernels evaluate this at the end of every split, so it divides by constants only.
inline constexpr int32_t kMaxGroups = 8;
constexpr int32_t SplitsPerGroup(int32_t num_splits) {
  return num_splits > 24 ? (num_splits + kMaxGroups - 1) / kMaxGroups
                         : (num_splits + kMaxGroups / 2 - 1) / (kMaxGroups / 2);
}
inline constexpr int32_t kMaxGroupSplits = SplitsPerGroup(kMaxWideSplits);

constexpr int32_t SplitsPerWorkTile(WorkGranularity granularity, int32_t num_splits) {
  switch (granularity) {
    case WorkGranularity::kSplit:
      return 1;
    case WorkGranularity::kSplitGroup:
      return SplitsPerGroup(num_splits);
    case WorkGranularity::kRequest:
      break;
  }
  return num_splits;
}

// What ChooseGranularity looks at. Work is measured in tokens times output tiles.
struct GranularityQuery {
  int64_t work_all = 0;      // of the step
  int64_t work_left = 0;     // of this request and those behind it in the queue
  int32_t started = 0;       // work tiles of the requests before it
  int32_t output_tiles = 0;  // of this request
  PrefixSplits kv_splits;
  int32_t span = 0;  // tokens of its prefix
};

// Chooses the coarsest work tiles that still balance the load. The queue goes from coarse to fine.
// A work tile may be as large as
//   * the work that is left for each CTA when its turn comes; or
//   * if the first wave of CTAs takes it: the work each CTA gets in all, or as many splits as some
//     CTA would get one by one, up to a fifth more than its share; or
//   * its share of two waves, if two waves are all there is.
inline constexpr int32_t kEvenWaves = 2;
constexpr WorkGranularity ChooseGranularity(const GranularityQuery& query, int32_t num_ctas) {
  for (WorkGranularity granularity = WorkGranularity::kRequest;
       granularity != WorkGranularity::kSplit;
       granularity = static_cast<WorkGranularity>(static_cast<int32_t>(granularity) - 1)) {
    const int32_t splits = SplitsPerWorkTile(granularity, query.kv_splits.num_splits);
    const int64_t whole = int64_t{splits} * query.kv_splits.split_tokens;
    const int64_t tokens = (whole < query.span ? whole : query.span) * num_ctas;
    const int64_t work_tiles =
        int64_t{(query.kv_splits.num_splits + splits - 1) / splits} * query.output_tiles;
    if (tokens <= query.work_left) return granularity;
    const int64_t one_less = (whole - query.kv_splits.split_tokens) * num_ctas;
    if (query.started + work_tiles <= num_ctas && one_less < query.work_all &&
        tokens * 5 <= query.work_all * 6) {
      return granularity;
    }
    for (int64_t waves = 1; waves <= kEvenWaves; ++waves) {
      const bool fits = query.started + work_tiles <= waves * num_ctas;
      const bool fills_waves = waves == 1 || waves * tokens * 21 >= query.work_all * 20;
      if (fits && fills_waves && waves * tokens * 20 <= query.work_all * 21) return granularity;
    }
  }
  return WorkGranularity::kSplit;
}

// Chooses the launch for a shape. Never throws: for a shape that the kernels do not support, the
// result has `unsupported` set.
NWOR_EXPORT VerifyConfig ChooseVerifyConfig(const VerifyShape& shape, const DeviceProps& device);

// Sizes of the two device buffers of a step. Both buffers must be 256-byte aligned; their contents
// are undefined until LaunchVerifyPlan has run. REQUIRES: config.unsupported == nullptr.
NWOR_EXPORT int64_t VerifyPlanBytes(const VerifyShape& shape, const VerifyConfig& config);
NWOR_EXPORT int64_t VerifyWorkspaceBytes(const VerifyShape& shape, const VerifyConfig& config);

}  // namespace nwor
