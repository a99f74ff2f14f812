#include "attention/heuristics.h"

#include <algorithm>

#include "attention/plan.h"
#include "attention/tile_shape.h"
#include "attention/unsupported.h"
#include "base/check.h"

namespace nwor {
namespace {

constexpr int32_t kReservedSmemBytes = 1024;  // the driver's own share of a block's shared memory
constexpr int32_t kMaxStages = 6;  // of kernels that are not tile kernels: see WaitCopies
constexpr int32_t kMaxLeaves = 32;
// What ChooseGrain can ask for: the groups of a prefix, the leaves of one; some more of each in the
// first round.
constexpr int64_t kSlotsPerCta = kMaxGroups + 2 * LeafGroup(24) + 3;

constexpr const char* kTooLittleShared = "more shared memory per block than the device has";

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What is missing, or null. Tells `got`, if there is one, which argument lacks it.
const char* FindUnsupported(const VerifyShape& shape, const DeviceProps& device, std::string* got) {
  const auto missing = [&](const char* expected, const auto&... parts) {
    if (got != nullptr) *got = Concat(parts...);
    return expected;
  };
  if (device.compute_capability < 80) {
    return missing("a device of compute capability 8.0 or newer", "device: got compute capability ",
                   device.compute_capability / 10, ".", device.compute_capability % 10);
  }
  switch (shape.head_dim) {
    case 64:
    case 80:
    case 96:
    case 128:
    case 192:
    case 256:
      break;
    default:
      return missing("head size 64, 80, 96, 128, 192 or 256", "query: got ", shape.head_dim,
                     " channels");
  }
  if (shape.dtype != DType::kFloat16 && shape.dtype != DType::kBFloat16) {
    return missing("float16 or bfloat16 rows", "query: got dtype ", Name(shape.dtype));
  }
  if (shape.cache_dtype != shape.dtype && shape.cache_dtype != DType::kFloat8E4M3) {
    return missing("a cache of the rows' type or of float8_e4m3fn", "key_cache: got dtype ",
                   Name(shape.cache_dtype), " beside ", Name(shape.dtype), " rows");
  }
  if (shape.page_size < 16 || shape.page_size % 16 != 0) {
    return missing("a page size that 16 divides", "key_cache: got pages of ", shape.page_size,
                   " tokens");
  }
  if (shape.block_size % 16 != 0) {
    return missing("a block size that 16 divides", "view.block_size: got ", shape.block_size);
  }
  if (shape.num_kv_heads <= 0 || shape.num_heads % shape.num_kv_heads != 0) {
    return missing("query heads in equal groups per KV head", "query: got ", shape.num_heads,
                   " heads over ", shape.num_kv_heads, " KV heads");
  }
  return nullptr;
}

// The smallest tile that holds a typical request's packed rows: rows beyond are padding that costs
// tensor work, rows left over cost another pass over the tokens.
int32_t ChooseRowTile(const VerifyShape& shape, int32_t largest) {
  const int64_t requests = std::max(shape.num_requests, 1);
  const int64_t rows = shape.rows_hint > 0 ? shape.rows_hint : CeilDiv(shape.num_rows, requests);
  const int64_t packed = rows * (shape.num_heads / shape.num_kv_heads);
  const int32_t tile = packed <= 16 ? 16 : packed <= 32 ? 32 : packed <= 64 ? 64 : 128;
  return std::min(tile, largest);
}

// Shared memory of a CTA: what it always needs, a pipeline stage, what the stages must hold at
// least.
struct SharedNeed {
  int32_t fixed, stage, least;
  int32_t min_stages, max_stages;
  int32_t max_ctas_per_sm;
  bool starts_early;
};

// Whether there are two leaves for each SM at most, of few rows: then a CTA has few steps, and they
// had better be under way all at once than shared by two CTAs.
bool IsAlone(const VerifyShape& shape, const DeviceProps& device, int32_t row_tile) {
  const int64_t packed = int64_t{shape.num_rows} * (shape.num_heads / shape.num_kv_heads);
  const int64_t tiles = std::max<int64_t>(shape.num_requests, CeilDiv(packed, row_tile));
  return TileHalves(shape.head_dim, row_tile) == 1 &&
         tiles * shape.num_kv_heads * kMaxLeaves / 2 <= device.num_sms;
}

SharedNeed NeedOf(const VerifyShape& shape, const DeviceProps& device, bool warpgroup,
                  int32_t row_tile) {
  const int dim = shape.head_dim;
  const bool float8 = shape.cache_dtype == DType::kFloat8E4M3;
  if (warpgroup) {
    const int32_t most = TileCtasPerSm(dim, TileGroups(row_tile));
    return {TileFixedBytes(dim, row_tile),
            TileStageBytes(dim),
            0,
            2,
            kMaxTileStages,
            IsAlone(shape, device, row_tile) ? 1 : most,
            false};
  }
  const bool may_pair = CtaThreads(dim, row_tile) == 32 * kStreams;
  return {
      QueryBytes(dim, row_tile) + kItemBytes + RowStateBytes(row_tile) + FoldBytes(dim, row_tile),
      kStreams * StageBytes(dim, float8),
      MergeBytes(dim, row_tile),
      1,
      kMaxStages,
      may_pair ? 2 : 1,
      StartsLeavesEarly(row_tile)};
}

// Two CTAs per SM hide each other's start and merge, where both can have a pipeline. False: too
// big.
bool FitSharedMemory(const SharedNeed& need, const DeviceProps& device, VerifyConfig* config) {
  for (int32_t ctas = need.max_ctas_per_sm; ctas >= 1; --ctas) {
    const int32_t room =
        std::min(device.smem_per_sm_bytes / ctas - kReservedSmemBytes, device.smem_per_block_bytes);
    const int32_t stages = std::min((room - need.fixed) / need.stage, need.max_stages);
    if (stages < std::max(need.min_stages, ctas) || need.fixed + need.least > room) continue;
    config->stages = stages;
    config->num_ctas = ctas * device.num_sms;
    // The merge buffer takes the place of the others.
    const int32_t apart = (room - need.fixed - need.least) / need.stage;
    config->early_stages = need.starts_early ? std::min(apart, stages - 1) : 0;
    config->smem_bytes =
        need.fixed + std::max(stages * need.stage, config->early_stages * need.stage + need.least);
    return true;
  }
  return false;
}

}  // namespace

VerifyConfig ChooseVerifyConfig(const VerifyShape& shape, const DeviceProps& device) {
  VerifyConfig config;
  config.unsupported = FindUnsupported(shape, device, nullptr);
  if (config.unsupported != nullptr) return config;

  // Float8 tokens are widened in registers, on their way to the other matrix instruction.
  config.warpgroup = device.warpgroup_mma && shape.cache_dtype != DType::kFloat8E4M3;
  const int32_t groups = MaxTileGroups(shape.head_dim);
  int32_t row_tile =
      ChooseRowTile(shape, config.warpgroup ? groups * kTileRows : MaxRowTile(shape.head_dim));
  while (!FitSharedMemory(NeedOf(shape, device, config.warpgroup, row_tile), device, &config)) {
    if (config.warpgroup || row_tile == 16) {
      config.unsupported = kTooLittleShared;
      return config;
    }
    row_tile /= 2;
  }
  config.row_tile = row_tile;

  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t tiles = CeilDiv(shape.num_rows * group, row_tile) + shape.num_requests;
  const int64_t pairs = tiles * shape.num_kv_heads;
  // Kernels whose streams meet at the end of a leaf want longer ones.
  config.min_leaf_tokens = config.warpgroup ? 384 : 512;
  config.max_leaves = kMaxLeaves;
  // Where it has been measured: 16-bit caches of older devices keep short leaves.
  const bool float8 = shape.cache_dtype == DType::kFloat8E4M3;
  config.fill_leaves = config.warpgroup || float8 ? device.num_sms / shape.num_kv_heads : 0;
  config.wide_ctas = config.warpgroup && groups > 1 ? device.num_sms : 0;
  config.max_pairs = static_cast<int32_t>(pairs);
  // Requests of many rows may have more leaves, a CTA's worth of row tiles each.
  int64_t leaves = pairs * config.max_leaves;
  if (config.wide_ctas > 0 && shape.num_rows * group > kTileRows) {
    const int64_t tiles_per_cta = CeilDiv(2 * kTileRows, row_tile);
    leaves = std::max(leaves, shape.num_requests * config.wide_ctas * tiles_per_cta);
  }
  config.max_slots = static_cast<int32_t>(std::min(kSlotsPerCta * config.num_ctas, leaves));
  // At least one per CTA: those without work find that out from an entry of their own.
  config.max_items = std::max(config.max_slots + config.max_pairs, config.num_ctas);
  return config;
}

std::string DescribeUnsupported(const VerifyShape& shape, const DeviceProps& device) {
  const char* expected = ChooseVerifyConfig(shape, device).unsupported;
  if (expected == nullptr) return {};
  std::string got = Concat("query: got ", shape.num_heads, "/", shape.num_kv_heads, " heads of ",
                           shape.head_dim, " channels");
  FindUnsupported(shape, device, &got);
  return Concat(got, ", expected ", expected);
}

int64_t VerifyPlanBytes(const VerifyShape& shape, const VerifyConfig& config) {
  return LocatePlan(shape.num_requests, config).end;
}

int64_t VerifyWorkspaceBytes(const VerifyShape& shape, const VerifyConfig& config) {
  return LocateWorkspace(shape.head_dim, config).end;
}

}  // namespace nwor
