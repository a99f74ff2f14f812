#pragma once

#include <cstdint>

#include "attention/tile_shape.h"
#include "base/export.h"
#include "base/types.h"

// Which kernel, how many CTAs and how much memory a verification step takes: pure functions of
// sizes the host knows. Nothing here reads device memory or needs CUDA. Thread-safe.

namespace nwor {

// Sizes of one step. Lengths are on the device and do not appear.
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
  // Rows of a typical request, for the choice of the row tile: 0 takes T / B. Affects speed only.
  int32_t rows_hint = 0;
};

struct DeviceProps {
  int32_t num_sms = 0;
  int32_t compute_capability = 0;    // 80, 89, 90, ...
  int32_t smem_per_block_bytes = 0;  // with opt-in
  int32_t smem_per_sm_bytes = 0;
  bool warpgroup_mma = false;  // sm_90, and the library was built for sm_90a
};

// How one launch is shaped. Row tile, stages and CTAs change speed, never a bit of the result; the
// kind of kernel and the leaves do, and follow from device, model and the request itself alone.
struct VerifyConfig {
  const char* unsupported = nullptr;  // what is missing, or null: the kernels serve this shape
  bool warpgroup = false;             // kernels for warpgroup matrix instructions
  int32_t row_tile = 0;               // packed rows per work item
  int32_t stages = 0;                 // pipeline depth per stream
  int32_t early_stages = 0;           // of them, filled while the leaf before is merged
  int32_t num_ctas = 0;               // persistent: fills the device once
  int32_t smem_bytes = 0;
  int32_t min_leaf_tokens = 0;  // a prefix is cut into leaves of at least so many tokens,
  int32_t max_leaves = 0;       // into at most so many
  int32_t fill_leaves = 0;      // leaves of all KV heads of one request for all SMs, one each
  // A request whose packed rows exceed a warpgroup's has other leaves: one for each of so many CTAs
  // at most, all its KV heads and row tiles together. 0: no difference is made.
  int32_t wide_ctas = 0;
  int32_t max_pairs = 0;  // (request, KV head, row tile) triples a step can have
  int32_t max_slots = 0;  // partial results the workspace holds
  int32_t max_items = 0;  // work items a plan can have
};

// Leaves of a prefix span of `tokens` tokens. A function of the request's own span and rows and of
// device and model constants only: that is what keeps results independent of the batch.
struct LeafSplit {
  int32_t leaf_tokens = 0;  // a multiple of kLeafAlign
  int32_t num_leaves = 1;   // at least 1: the last leaf also takes the in-flight rows
};
inline constexpr int32_t kLeafAlign = 64;

// Of some more leaves than fill the device once, a few CTAs would work on two and most on one, and
// every leaf's end costs: up to `reach` times as many, the leaves are longer instead.
constexpr LeafSplit SplitPrefix(int32_t tokens, int32_t min_leaf_tokens, int32_t max_leaves,
                                int32_t fill_leaves = 0, int32_t reach = 1) {
  const int64_t span = tokens;
  int64_t leaves = (span + min_leaf_tokens - 1) / min_leaf_tokens;
  if (leaves > fill_leaves && leaves <= int64_t{reach} * fill_leaves) leaves = fill_leaves;
  leaves = leaves < 1 ? 1 : (leaves > max_leaves ? max_leaves : leaves);
  int64_t leaf = (span + leaves - 1) / leaves;
  leaf = (leaf + kLeafAlign - 1) / kLeafAlign * kLeafAlign;
  leaf = leaf < kLeafAlign ? kLeafAlign : leaf;
  const int64_t count = (span + leaf - 1) / leaf;
  return {static_cast<int32_t>(leaf), static_cast<int32_t>(count < 1 ? 1 : count)};
}

// Leaves of a request whose packed rows exceed a warpgroup's: one for each of `ctas` CTAs at most
// over its `pairs` of KV head and row tile, so few and long ones where these are many. What bounds
// it is arithmetic, and folds cost some.
inline constexpr int32_t kMinWideLeafTokens = 512;
inline constexpr int32_t kMaxWideLeaves = 128;
constexpr LeafSplit SplitWidePrefix(int32_t tokens, int32_t pairs, int32_t ctas) {
  const int32_t most = ctas > pairs ? ctas / pairs : 1;
  return SplitPrefix(tokens, kMinWideLeafTokens, most < kMaxWideLeaves ? most : kMaxWideLeaves);
}

// Leaves of a request with that many packed rows. With more than 32 of them tile kernels have two
// CTAs on an SM even for one request (of heads up to 128), and want leaves for both.
constexpr LeafSplit SplitRequest(int32_t tokens, int32_t packed_rows, int32_t kv_heads,
                                 const VerifyConfig& config) {
  if (config.wide_ctas > 0 && packed_rows > kTileRows) {
    const int32_t tiles = (packed_rows + 2 * kTileRows - 1) / (2 * kTileRows);
    return SplitWidePrefix(tokens, tiles * kv_heads, config.wide_ctas);
  }
  const int32_t reach = config.warpgroup && packed_rows > kTileRows / 2 ? 2 : 4;
  return SplitPrefix(tokens, config.min_leaf_tokens, config.max_leaves, config.fill_leaves, reach);
}

// How much of a request one work item takes. Coarse items leave few partial results, fine ones end
// evenly. The result is the same: partials are folded in the same tree either way.
enum class ItemGrain : int32_t { kLeaf, kLeafGroup, kRequest };

// Leaves of a group: a request has four groups of equal length, or eight. Kernels ask at every end
// of a leaf, so nothing is divided by a variable.
inline constexpr int32_t kMaxGroups = 8;
constexpr int32_t LeafGroup(int32_t num_leaves) {
  return num_leaves > 24 ? (num_leaves + kMaxGroups - 1) / kMaxGroups
                         : (num_leaves + kMaxGroups / 2 - 1) / (kMaxGroups / 2);
}
inline constexpr int32_t kMaxGroupLeaves = LeafGroup(kMaxWideLeaves);

constexpr int32_t LeavesPerItem(ItemGrain grain, int32_t num_leaves) {
  switch (grain) {
    case ItemGrain::kLeaf:
      return 1;
    case ItemGrain::kLeafGroup:
      return LeafGroup(num_leaves);
    case ItemGrain::kRequest:
      break;
  }
  return num_leaves;
}

// What the choice of a request's grain looks at. Work counts tokens times pairs.
struct GrainQuery {
  int64_t work_all = 0;   // of the step
  int64_t work_left = 0;  // of this request and those after it in the queue
  int32_t started = 0;    // items of the requests before it
  int32_t pairs = 0;      // of this request
  LeafSplit split;
  int32_t span = 0;  // tokens of its prefix
};

// The queue goes from coarse to fine. An item may be as large as what is left for each CTA when its
// turn comes; or, if the first round of CTAs takes it, as large as what each CTA gets in all, or as
// many leaves as some CTA would get of them one by one (and a fifth more than its share at most);
// or as large as its share in two rounds, if these are all.
inline constexpr int32_t kEvenRounds = 2;
constexpr ItemGrain ChooseGrain(const GrainQuery& query, int32_t num_ctas) {
  for (ItemGrain grain = ItemGrain::kRequest; grain != ItemGrain::kLeaf;
       grain = static_cast<ItemGrain>(static_cast<int32_t>(grain) - 1)) {
    const int32_t leaves = LeavesPerItem(grain, query.split.num_leaves);
    const int64_t whole = int64_t{leaves} * query.split.leaf_tokens;
    const int64_t tokens = (whole < query.span ? whole : query.span) * num_ctas;
    const int64_t items = int64_t{(query.split.num_leaves + leaves - 1) / leaves} * query.pairs;
    if (tokens <= query.work_left) return grain;
    const int64_t fewer = (whole - query.split.leaf_tokens) * num_ctas;
    if (query.started + items <= num_ctas && fewer < query.work_all &&
        tokens * 5 <= query.work_all * 6) {
      return grain;
    }
    for (int64_t rounds = 1; rounds <= kEvenRounds; ++rounds) {
      const bool fits = query.started + items <= rounds * num_ctas;
      const bool is_all = rounds == 1 || rounds * tokens * 21 >= query.work_all * 20;
      if (fits && is_all && rounds * tokens * 20 <= query.work_all * 21) return grain;
    }
  }
  return ItemGrain::kLeaf;
}

// Never throws: a shape the kernels do not serve comes back with `unsupported` set.
NWOR_EXPORT VerifyConfig ChooseVerifyConfig(const VerifyShape& shape, const DeviceProps& device);

// Fixed sizes of the two device buffers of a step; both 256-byte aligned, contents undefined until
// LaunchVerifyPlan. REQUIRES: config.unsupported == nullptr.
NWOR_EXPORT int64_t VerifyPlanBytes(const VerifyShape& shape, const VerifyConfig& config);
NWOR_EXPORT int64_t VerifyWorkspaceBytes(const VerifyShape& shape, const VerifyConfig& config);

}  // namespace nwor
