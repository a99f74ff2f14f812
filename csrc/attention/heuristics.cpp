#include "attention/heuristics.h"

#include <algorithm>
#include <cstdint>

#include "attention/cuda/sm80/tile_shape.h"
#include "attention/cuda/sm90/tile_shape.h"
#include "attention/plan.h"
#include "attention/unsupported.h"
#include "base/check.h"

namespace nwor {
namespace {

constexpr int32_t kReservedSmemBytes = 1024;  // shared memory that the driver takes of each block
constexpr int32_t kMaxSm80Stages = 6;         // ptx::WaitCopies takes no more
constexpr int32_t kMaxSplits = 32;
// What ChooseGranularity can need: all groups of a prefix, the splits of a group, and a few more of
// each in the first wave.
constexpr int64_t kSlotsPerCta = kMaxGroups + 2 * SplitsPerGroup(24) + 3;

constexpr const char* kTooLittleShared = "a device with more shared memory per block";

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What is missing, or null if nothing is. Sets `got`, if not null, to the argument that is wrong.
const char* FindUnsupported(const VerifyShape& shape, const DeviceProps& device, std::string* got) {
  const auto missing = [&](const char* expected, const auto&... values) {
    if (got != nullptr) *got = Concat(values...);
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
    return missing("a page size that is a multiple of 16", "key_cache: got pages of ",
                   shape.page_size, " tokens");
  }
  if (shape.block_size % 16 != 0) {
    return missing("a block size that is a multiple of 16", "view.block_size: got ",
                   shape.block_size);
  }
  if (shape.num_kv_heads <= 0 || shape.num_heads % shape.num_kv_heads != 0) {
    return missing("query heads that are a multiple of the KV heads", "query: got ",
                   shape.num_heads, " heads over ", shape.num_kv_heads, " KV heads");
  }
  return nullptr;
}

// The smallest tile that holds the packed rows of a typical request. Rows of padding cost tensor
// core work; rows that do not fit cost another pass over the tokens.
int32_t ChooseRowTile(const VerifyShape& shape, int32_t largest) {
  const int64_t requests = std::max(shape.num_requests, 1);
  const int64_t rows = shape.rows_hint > 0 ? shape.rows_hint : CeilDiv(shape.num_rows, requests);
  const int64_t packed = rows * (shape.num_heads / shape.num_kv_heads);
  const int32_t tile = packed <= 16 ? 16 : packed <= 32 ? 32 : packed <= 64 ? 64 : 128;
  return std::min(tile, largest);
}

// Shared memory of a CTA: a fixed part, one pipeline stage, and what the stages must hold at least.
struct SmemRequirement {
  int32_t fixed, stage, least;
  int32_t min_stages, max_stages;
  int32_t max_ctas_per_sm;
  bool prefetches_next_split;
  int32_t raw_stage;  // 0: no raw stages
};

// Whether one CTA per SM is better than two: then a CTA has few steps, and one deep pipeline loads
// them all at once. With few rows up to two splits for each SM are few; with more rows one is.
bool PrefersOneCtaPerSm(const VerifyShape& shape, const DeviceProps& device,
                        const VerifyConfig& config, int32_t row_tile) {
  const int32_t warpgroups = sm90::ConsumerWarpgroups(row_tile);
  if (!config.warpgroup || sm90::CtasPerSm(shape.head_dim, warpgroups) == 1) return false;
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t tiles =
      std::max<int64_t>(shape.num_requests, CeilDiv(shape.num_rows * group, row_tile));
  if (sm90::RowHalves(shape.head_dim, row_tile) == 1) {
    return tiles * shape.num_kv_heads * kMaxSplits / 2 <= device.num_sms;
  }
  if (shape.max_prefix_tokens <= 0 || shape.max_prefix_tokens > INT32_MAX) return false;
  const PrefixSplits most = SplitRequest(static_cast<int32_t>(shape.max_prefix_tokens), row_tile,
                                         shape.num_kv_heads, config);
  return tiles * shape.num_kv_heads * most.num_splits <= device.num_sms;
}

SmemRequirement SmemRequirementOf(const VerifyShape& shape, bool warpgroup, int32_t row_tile) {
  const int dim = shape.head_dim;
  const bool float8 = shape.cache_dtype == DType::kFloat8E4M3;
  if (warpgroup) {
    return {sm90::FixedBytes(dim, row_tile),
            sm90::StageBytes(dim),
            0,
            2,
            sm90::kMaxStages,
            sm90::CtasPerSm(dim, sm90::ConsumerWarpgroups(row_tile)),
            false,
            float8 ? sm90::RawStageBytes(dim) : 0};
  }
  const bool fits_twice = sm80::CtaThreads(dim, row_tile) == 32 * sm80::kKvWarps;
  return {sm80::QueryBytes(dim, row_tile) + sm80::kWorkTileBytes + sm80::RowStateBytes(row_tile) +
              sm80::GroupOutputBytes(dim, row_tile),
          sm80::kKvWarps * sm80::StageBytes(dim, float8),
          sm80::MergeBytes(dim, row_tile),
          1,
          kMaxSm80Stages,
          fits_twice ? 2 : 1,
          sm80::PrefetchesNextSplit(row_tile),
          0};
}

// The same where tokens wait in raw stages: the second stage has to leave room for four of them.
bool FitRawStages(const SmemRequirement& smem, const DeviceProps& device, VerifyConfig* config) {
  for (int32_t ctas = smem.max_ctas_per_sm; ctas >= 1; --ctas) {
    const int32_t room =
        std::min(device.smem_per_sm_bytes / ctas - kReservedSmemBytes, device.smem_per_block_bytes);
    for (int32_t stages = 2; stages >= 1; --stages) {
      const int32_t beside = room - smem.fixed - stages * smem.stage;
      const int32_t raw_stages = std::min(beside / smem.raw_stage, sm90::kMaxRawStages);
      if (raw_stages < 2 * stages) continue;
      config->stages = stages;
      config->raw_stages = raw_stages;
      config->num_ctas = ctas * device.num_sms;
      config->smem_bytes = smem.fixed + stages * smem.stage + raw_stages * smem.raw_stage;
      return true;
    }
  }
  return false;
}

// Chooses CTAs per SM and stages. Two CTAs hide each other's start and merge, if each has room for
// a pipeline. Returns false if not even one CTA fits.
bool FitSharedMemory(const SmemRequirement& smem, const DeviceProps& device, VerifyConfig* config) {
  if (smem.raw_stage > 0) return FitRawStages(smem, device, config);
  for (int32_t ctas = smem.max_ctas_per_sm; ctas >= 1; --ctas) {
    const int32_t room =
        std::min(device.smem_per_sm_bytes / ctas - kReservedSmemBytes, device.smem_per_block_bytes);
    const int32_t stages = std::min((room - smem.fixed) / smem.stage, smem.max_stages);
    if (stages < std::max(smem.min_stages, ctas) || smem.fixed + smem.least > room) continue;
    config->stages = stages;
    config->num_ctas = ctas * device.num_sms;
    // The merge buffer takes the place of the other stages.
    const int32_t beside_merge = (room - smem.fixed - smem.least) / smem.stage;
    config->prefetch_stages = smem.prefetches_next_split ? std::min(beside_merge, stages - 1) : 0;
    config->smem_bytes = smem.fixed + std::max(stages * smem.stage,
                                               config->prefetch_stages * smem.stage + smem.least);
    return true;
  }
  return false;
}

}  // namespace

VerifyConfig ChooseVerifyConfig(const VerifyShape& shape, const DeviceProps& device) {
  VerifyConfig config;
  config.unsupported = FindUnsupported(shape, device, nullptr);
  if (config.unsupported != nullptr) return config;

  config.max_smem_bytes = device.smem_per_block_bytes;
  const bool float8 = shape.cache_dtype == DType::kFloat8E4M3;
  config.warpgroup = device.warpgroup_mma && (!float8 || sm90::TakesFloat8(shape.head_dim));
  const int32_t warpgroups = sm90::MaxConsumerWarpgroups(shape.head_dim, float8);
  int32_t row_tile = ChooseRowTile(shape, config.warpgroup ? warpgroups * sm90::kWarpgroupRows
                                                           : sm80::MaxRowTile(shape.head_dim));
  SmemRequirement smem = SmemRequirementOf(shape, config.warpgroup, row_tile);
  while (!FitSharedMemory(smem, device, &config)) {
    if (config.warpgroup || row_tile == 16) {
      config.unsupported = kTooLittleShared;
      return config;
    }
    row_tile /= 2;
    smem = SmemRequirementOf(shape, config.warpgroup, row_tile);
  }
  config.row_tile = row_tile;
  config.max_ctas = config.num_ctas;

  const int64_t group = shape.num_heads / shape.num_kv_heads;
  const int64_t tiles = CeilDiv(shape.num_rows * group, row_tile) + shape.num_requests;
  const int64_t output_tiles = tiles * shape.num_kv_heads;
  // The sm_80 kernel merges its KV warps at the end of every split, so its splits are longer.
  config.min_split_tokens = config.warpgroup ? 384 : 512;
  config.max_splits = kMaxSplits;
  // Only where it was measured to help: 16-bit caches on older devices keep short splits.
  config.fill_splits = config.warpgroup || float8 ? device.num_sms / shape.num_kv_heads : 0;
  config.wide_ctas = config.warpgroup && warpgroups > 1 ? device.num_sms : 0;
  if (PrefersOneCtaPerSm(shape, device, config, row_tile)) {
    smem.max_ctas_per_sm = 1;
    FitSharedMemory(smem, device, &config);  // what fits twice fits once
  }
  config.max_output_tiles = static_cast<int32_t>(output_tiles);
  // Requests with many rows may have more splits.
  int64_t splits = output_tiles * config.max_splits;
  if (config.wide_ctas > 0 && shape.num_rows * group > sm90::kWarpgroupRows) {
    const int64_t tiles_per_cta = CeilDiv(2 * sm90::kWarpgroupRows, row_tile);
    splits = std::max(splits, shape.num_requests * config.wide_ctas * tiles_per_cta);
  }
  config.max_slots = static_cast<int32_t>(std::min(kSlotsPerCta * config.max_ctas, splits));
  // At least one entry per CTA: a CTA without work learns that from its own entry.
  config.max_work_tiles = std::max(config.max_slots + config.max_output_tiles, config.max_ctas);
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
