#include "attention/heuristics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "attention/cuda/combine_shape.h"
#include "attention/cuda/sm80/tile_shape.h"
#include "attention/cuda/sm90/tile_shape.h"
#include "attention/plan.h"
#include "attention/unsupported.h"
#include "test_seed.h"

namespace nwor {
namespace {

constexpr DeviceProps kH200{132, 90, 232448, 233472, true};
constexpr DeviceProps kH200WithoutWarpgroups{132, 90, 232448, 233472, false};
constexpr DeviceProps kA100{108, 80, 166912, 167936, false};
constexpr DeviceProps kL40{142, 89, 101376, 102400, false};

VerifyShape Shape(int requests, int rows, int heads = 32, int kv_heads = 8, int head_dim = 128) {
  VerifyShape shape;
  shape.num_requests = requests;
  shape.num_rows = requests * rows;
  shape.num_heads = heads;
  shape.num_kv_heads = kv_heads;
  shape.head_dim = head_dim;
  return shape;
}

TEST(SplitPrefix, CoversTheSpanWithSplitsOfWholeSteps) {
  std::mt19937 random(TestSeed());
  for (int i = 0; i < 20000; ++i) {
    const int bits = std::uniform_int_distribution<>(0, 20)(random);
    const int tokens = std::uniform_int_distribution<>(0, 1 << bits)(random);
    const int max_splits = std::uniform_int_distribution<>(1, 128)(random);
    const int min_split = 64 * std::uniform_int_distribution<>(1, 16)(random);
    const int fill = std::uniform_int_distribution<>(0, 140)(random);
    const int reach = std::uniform_int_distribution<>(1, 4)(random);
    const PrefixSplits kv_splits = SplitPrefix(tokens, min_split, max_splits, fill, reach);
    ASSERT_GE(kv_splits.num_splits, 1);
    ASSERT_LE(kv_splits.num_splits, max_splits);
    ASSERT_EQ(kv_splits.split_tokens % kSplitAlign, 0);
    const int64_t covered = int64_t{kv_splits.split_tokens} * kv_splits.num_splits;
    ASSERT_GE(covered, tokens);
    if (kv_splits.num_splits > 1) {
      ASSERT_LT(covered - kv_splits.split_tokens, tokens)
          << "the last split of " << tokens << " is empty";
    }
  }
}

TEST(SplitPrefix, KeepsAnEmptyPrefixAsOneSplitForTheInFlightRows) {
  EXPECT_EQ(SplitPrefix(0, 256, 16).num_splits, 1);
  EXPECT_GT(SplitPrefix(0, 256, 16).split_tokens, 0);
}

TEST(SplitPrefix, HoldsForAMillionTokens) {
  const PrefixSplits kv_splits = SplitPrefix(1 << 20, 256, 16);
  EXPECT_EQ(kv_splits.num_splits, 16);
  EXPECT_EQ(kv_splits.split_tokens, 1 << 16);
}

// Splits of a request with 8 KV heads, usually 8 rows of 4 query heads each.
PrefixSplits Split(int tokens, const VerifyConfig& config, int packed_rows = 32) {
  return SplitRequest(tokens, packed_rows, 8, config);
}

TEST(SplitRequest, NeverLeavesASecondWaveToAFewCtas) {
  for (const DeviceProps& device : {kH200, kA100, kL40}) {
    for (const int kv_heads : {1, 2, 4, 8, 16, 32}) {
      VerifyShape shape = Shape(1, 1, 32, kv_heads);
      if (!device.warpgroup_mma) shape.cache_dtype = DType::kFloat8E4M3;
      const VerifyConfig config = ChooseVerifyConfig(shape, device);
      ASSERT_GT(config.fill_splits, 0);
      const int packed = 32 / kv_heads;
      const int four_waves = 4 * config.fill_splits * config.min_split_tokens;
      for (int tokens = 0; tokens <= four_waves; tokens += 64) {
        const int splits = SplitRequest(tokens, packed, kv_heads, config).num_splits;
        EXPECT_LE(splits * kv_heads, config.num_ctas) << tokens << " tokens, " << kv_heads;
      }
    }
  }
}

TEST(SplitRequest, GivesLongSplitsToRequestsThatFillTheDevice) {
  const VerifyConfig config = ChooseVerifyConfig(Shape(1, 8), kH200);
  EXPECT_EQ(Split(4608, config).num_splits, 12);
  EXPECT_EQ(Split(16384, config).num_splits, 16);
  EXPECT_EQ(Split(24576, config).num_splits, 16);
  EXPECT_EQ(Split(32768, config).num_splits, 32);
  // 16 rows: two CTAs on an SM.
  EXPECT_EQ(Split(12288, config, 64).num_splits, 16);
  EXPECT_EQ(Split(16384, config, 64).num_splits, 32);
  VerifyShape float8 = Shape(8, 1);
  float8.cache_dtype = DType::kFloat8E4M3;
  const VerifyConfig other = ChooseVerifyConfig(float8, kH200WithoutWarpgroups);
  for (const int packed : {4, 32, 64}) {
    EXPECT_EQ(Split(8192, other, packed).num_splits, 16);
    EXPECT_EQ(Split(32768, other, packed).num_splits, 16);
    EXPECT_EQ(Split(65536, other, packed).num_splits, 32);
  }
  // Not measured on older devices.
  EXPECT_EQ(Split(16384, ChooseVerifyConfig(Shape(8, 1), kA100)).num_splits, 32);
}

// Granularities of equal `requests`, as the planner asks for them: 8 KV heads, one row tile each.
std::vector<WorkGranularity> Granularities(int requests, int tokens, const VerifyConfig& config) {
  GranularityQuery query;
  query.output_tiles = 8;
  query.kv_splits = Split(tokens, config);
  query.span = tokens;
  query.work_all = query.work_left = int64_t{tokens} * 8 * requests;
  std::vector<WorkGranularity> granularities;
  for (int b = 0; b < requests; ++b) {
    granularities.push_back(ChooseGranularity(query, config.num_ctas));
    const int splits = SplitsPerWorkTile(granularities.back(), query.kv_splits.num_splits);
    query.started = std::min(query.started + (query.kv_splits.num_splits + splits - 1) / splits * 8,
                             kEvenWaves * config.num_ctas);
    query.work_left -= int64_t{tokens} * 8;
  }
  return granularities;
}

// Splits of each work tile of the step, as the queue has them: long ones first.
std::vector<int> WorkTiles(int requests, int tokens, const VerifyConfig& config) {
  const int splits = Split(tokens, config).num_splits;
  std::vector<int> work_tiles;
  for (const WorkGranularity granularity : Granularities(requests, tokens, config)) {
    const int per_work_tile = SplitsPerWorkTile(granularity, splits);
    for (int first = 0; first < splits; first += per_work_tile) {
      work_tiles.insert(work_tiles.end(), 8, std::min(per_work_tile, splits - first));
    }
  }
  std::sort(work_tiles.rbegin(), work_tiles.rend());
  return work_tiles;
}

TEST(ChooseGranularity, FillsTheDeviceForOneLongRequest) {
  const VerifyConfig config = ChooseVerifyConfig(Shape(1, 8), kH200);
  for (const int tokens : {32768, 131072, 1 << 20}) {
    const size_t work_tiles = WorkTiles(1, tokens, config).size();
    EXPECT_GT(work_tiles, 2 * kH200.num_sms * 9 / 10) << tokens;
    EXPECT_LE(work_tiles, 2 * config.num_ctas) << tokens;
  }
}

TEST(ChooseGranularity, IsFineForFewRequestsAndGoesFromCoarseToFineForMany) {
  const VerifyConfig config = ChooseVerifyConfig(Shape(1, 8), kH200);
  EXPECT_EQ(Granularities(1, 4608, config).front(), WorkGranularity::kSplit);
  EXPECT_EQ(Granularities(1, 32768, config).front(), WorkGranularity::kSplit);
  EXPECT_EQ(Granularities(8, 32768, config).front(), WorkGranularity::kSplitGroup);
  EXPECT_EQ(Granularities(500, 32768, config).front(), WorkGranularity::kRequest);
  for (const int requests : {1, 5, 17, 100, 500}) {
    const std::vector<WorkGranularity> granularities = Granularities(requests, 32768, config);
    EXPECT_EQ(granularities.back(), WorkGranularity::kSplit);
    EXPECT_TRUE(std::is_sorted(granularities.rbegin(), granularities.rend()));
  }
}

TEST(ChooseGranularity, StaysWithinTheSlotsOfTheWorkspace) {
  for (const DeviceProps& device : {kH200, kA100}) {
    for (const int tokens : {257, 513, 2048, 4608, 9000, 16384, 32768, 131072, 1 << 20}) {
      for (int requests = 1; requests < 2000; requests = requests * 5 / 4 + 1) {
        const VerifyConfig config = ChooseVerifyConfig(Shape(requests, 8), device);
        const int splits = Split(tokens, config).num_splits;
        int64_t slots = 0;
        for (const WorkGranularity granularity : Granularities(requests, tokens, config)) {
          const int per_work_tile = SplitsPerWorkTile(granularity, splits);
          if (per_work_tile < splits) slots += 8 * ((splits + per_work_tile - 1) / per_work_tile);
        }
        EXPECT_LE(slots, config.max_slots) << requests << " x " << tokens;
      }
    }
  }
}

TEST(ChooseGranularity, StaysWithinTheSlotsForManyRowsOfFewHeads) {
  for (const int kv_heads : {1, 2, 3, 8}) {
    for (const int rows : {3, 9, 16, 32, 64, 256}) {
      for (const int requests : {1, 2, 4, 8, 40}) {
        const int packed = rows * 8;
        const VerifyShape shape = Shape(requests, rows, 8 * kv_heads, kv_heads);
        const VerifyConfig config = ChooseVerifyConfig(shape, kH200);
        for (int tokens = 400; tokens < 200'000; tokens += tokens / 7) {
          GranularityQuery query;
          query.output_tiles = (packed + config.row_tile - 1) / config.row_tile * kv_heads;
          query.kv_splits = SplitRequest(tokens, packed, kv_heads, config);
          query.span = tokens;
          const int64_t work = int64_t{tokens} * query.output_tiles;
          query.work_all = query.work_left = work * requests;
          int64_t slots = 0;
          for (int b = 0; b < requests; ++b) {
            const int splits = SplitsPerWorkTile(ChooseGranularity(query, config.num_ctas),
                                                 query.kv_splits.num_splits);
            const int partials = (query.kv_splits.num_splits + splits - 1) / splits;
            if (partials > 1) slots += int64_t{partials} * query.output_tiles;
            query.started = std::min(query.started + partials * query.output_tiles,
                                     kEvenWaves * config.num_ctas);
            query.work_left -= work;
          }
          ASSERT_LE(slots, config.max_slots)
              << requests << " x " << tokens << " tokens, " << rows << " rows, " << kv_heads;
        }
      }
    }
  }
}

TEST(ChooseGranularity, EndsEvenlyForBatchesThatDoNotFitTheDevice) {
  // The queue's list schedule of equal-speed CTAs, against a perfect division of the work.
  const VerifyConfig config = ChooseVerifyConfig(Shape(4, 8), kH200);
  const PrefixSplits kv_splits = Split(32768, config);
  for (int requests = 4; requests <= 40; ++requests) {
    std::priority_queue<int, std::vector<int>, std::greater<>> busy_until;
    for (int i = 0; i < config.num_ctas; ++i) busy_until.push(0);
    int end = 0;
    for (const int splits : WorkTiles(requests, 32768, config)) {
      const int done = busy_until.top() + splits;
      busy_until.pop();
      busy_until.push(done);
      end = std::max(end, done);
    }
    const double ideal = 8.0 * requests * kv_splits.num_splits / config.num_ctas;
    EXPECT_LE(end, ideal + 1.5) << requests << " requests";
  }
}

TEST(SplitsPerGroup, GivesAtMostEightGroupsOfEqualLength) {
  for (int splits = 1; splits <= 132; ++splits) {
    const int group = SplitsPerGroup(splits);
    const int groups = (splits + group - 1) / group;
    EXPECT_LE(groups, kMaxGroups) << splits;
    EXPECT_GE(group * groups, splits);
    EXPECT_LT(group * (groups - 1), splits);
  }
  // Eight requests of 4608 tokens: a work tile for every CTA, all of them of the same length.
  const VerifyConfig config = ChooseVerifyConfig(Shape(8, 8), kH200);
  const std::vector<int> work_tiles = WorkTiles(8, 4608, config);
  EXPECT_EQ(work_tiles.size(), 256u);
  EXPECT_EQ(work_tiles.front(), work_tiles.back());
  EXPECT_LE(work_tiles.size(), static_cast<size_t>(config.num_ctas));
}

TEST(ChooseGranularity, GivesEveryCtaOneWorkTileOfEightFloat8Requests) {
  VerifyShape shape = Shape(8, 1);
  shape.cache_dtype = DType::kFloat8E4M3;
  const VerifyConfig config = ChooseVerifyConfig(shape, kH200WithoutWarpgroups);
  const std::vector<int> work_tiles = WorkTiles(8, 32768, config);
  EXPECT_EQ(work_tiles.size(), 256u);
  EXPECT_EQ(work_tiles.front(), work_tiles.back());
}

TEST(ChooseGranularity, TakesGroupsWhereSplitsWouldEndNoEarlier) {
  const VerifyConfig config = ChooseVerifyConfig(Shape(8, 8), kH200);
  // Partial views of the default budget with in-flight rows: if work tiles were single splits, the
  // busiest CTA would get three, which is a group.
  for (int tokens = 4096; tokens <= 4608; tokens += 16) {
    const std::vector<int> work_tiles = WorkTiles(8, tokens, config);
    EXPECT_LE(work_tiles.size(), static_cast<size_t>(config.num_ctas)) << tokens;
    const double share = 8.0 * 8 * Split(tokens, config).num_splits / config.num_ctas;
    EXPECT_LE(work_tiles.front(), std::ceil(share)) << tokens;
  }
  // Half of them would leave half of the device without work.
  EXPECT_GT(WorkTiles(4, 4256, config).size(), static_cast<size_t>(config.num_ctas));
}

TEST(WorkTile, KnowsTheSplitsOfItsOutputTilesPartials) {
  for (int splits = 2; splits <= 128; ++splits) {
    for (const WorkGranularity granularity :
         {WorkGranularity::kSplit, WorkGranularity::kSplitGroup}) {
      const int per_work_tile = SplitsPerWorkTile(granularity, splits);
      WorkTile work_tile = {};
      work_tile.num_splits = splits;
      work_tile.num_partials = (splits + per_work_tile - 1) / per_work_tile;
      if (work_tile.num_partials == 1) continue;
      // Other granularities may give as many partials, but then of the same splits.
      EXPECT_EQ((splits + work_tile.splits_per_partial() - 1) / work_tile.splits_per_partial(),
                work_tile.num_partials);
      EXPECT_EQ(work_tile.splits_per_partial(), per_work_tile) << splits;
    }
  }
}

// Four requests of every head size, cache type and usual number of rows, on each of the devices.
std::vector<std::pair<DeviceProps, VerifyShape>> EveryKind(
    std::initializer_list<DeviceProps> devices) {
  std::vector<std::pair<DeviceProps, VerifyShape>> kinds;
  for (const DeviceProps& device : devices) {
    for (const int head_dim : {64, 80, 96, 128, 192, 256}) {
      for (const DType cache : {DType::kBFloat16, DType::kFloat8E4M3}) {
        for (const int rows : {1, 4, 8, 16, 64, 200, 256}) {
          VerifyShape shape = Shape(4, rows, 32, 8, head_dim);
          shape.cache_dtype = cache;
          kinds.emplace_back(device, shape);
        }
      }
    }
  }
  return kinds;
}

TEST(ChooseVerifyConfig, FitsSharedMemoryForEveryHeadSizeTypeAndDevice) {
  for (const auto& [device, shape] : EveryKind({kH200, kH200WithoutWarpgroups, kA100, kL40})) {
    const VerifyConfig config = ChooseVerifyConfig(shape, device);
    ASSERT_EQ(config.unsupported, nullptr) << shape.head_dim << " " << config.unsupported;
    EXPECT_LE(config.smem_bytes, device.smem_per_block_bytes);
    EXPECT_GE(config.stages, 1);
    EXPECT_EQ(config.num_ctas % device.num_sms, 0);
    const int ctas_per_sm = config.num_ctas / device.num_sms;
    EXPECT_LE(ctas_per_sm * (config.smem_bytes + 1024), device.smem_per_sm_bytes);
  }
}

TEST(ChooseVerifyConfig, GivesAnSmTwoCtasOfTwoStagesForUsualRows) {
  for (const int head_dim : {64, 80, 96, 128}) {
    for (const int rows : {1, 8, 16}) {
      const VerifyConfig config = ChooseVerifyConfig(Shape(4, rows, 32, 8, head_dim), kH200);
      EXPECT_EQ(config.num_ctas, 2 * kH200.num_sms) << head_dim << " " << rows;
      EXPECT_GE(config.stages, 2) << head_dim << " " << rows;
    }
  }
}

TEST(ChooseVerifyConfig, GivesOneRequestOfFewRowsADeepPipelineOnEachSm) {
  EXPECT_EQ(ChooseVerifyConfig(Shape(1, 16), kH200).num_ctas, 2 * kH200.num_sms);
  for (const int rows : {1, 8}) {
    const VerifyConfig config = ChooseVerifyConfig(Shape(1, rows), kH200);
    EXPECT_EQ(config.num_ctas, kH200.num_sms) << rows;
    EXPECT_GE(config.stages, 5) << rows;
    EXPECT_EQ(ChooseVerifyConfig(Shape(2, rows), kH200).num_ctas, 2 * kH200.num_sms) << rows;
    EXPECT_EQ(ChooseVerifyConfig(Shape(2, rows, 16, 4), kH200).num_ctas, kH200.num_sms) << rows;
  }
}

TEST(ChooseVerifyConfig, GivesSixteenRowsOfAShortRequestADeepPipelineOnEachSm) {
  const auto config = [](int64_t max_prefix_tokens, int requests = 1, int rows = 16) {
    VerifyShape shape = Shape(requests, rows);
    shape.max_prefix_tokens = max_prefix_tokens;
    return ChooseVerifyConfig(shape, kH200);
  };
  for (const int tokens : {1, 1024, 4624}) {
    EXPECT_EQ(config(tokens).num_ctas, kH200.num_sms) << tokens;
    EXPECT_GE(config(tokens).stages, 5) << tokens;
  }
  // One split more than there are SMs for, or a length that the host does not know.
  for (const int64_t tokens : {int64_t{16384}, int64_t{1} << 40, int64_t{0}}) {
    EXPECT_EQ(config(tokens).num_ctas, 2 * kH200.num_sms) << tokens;
  }
  EXPECT_EQ(config(1024, 4).num_ctas, kH200.num_sms);
  EXPECT_EQ(config(4624, 4).num_ctas, 2 * kH200.num_sms);
  // The bound changes neither sizes, which are asked for without it, nor splits.
  for (const int rows : {1, 8, 16, 64}) {
    VerifyShape shape = Shape(1, rows);
    const VerifyConfig unknown = ChooseVerifyConfig(shape, kH200);
    for (const int tokens : {1024, 4624, 100'000}) {
      const VerifyConfig known = config(tokens, 1, rows);
      EXPECT_EQ(VerifyPlanBytes(shape, known), VerifyPlanBytes(shape, unknown));
      EXPECT_EQ(VerifyWorkspaceBytes(shape, known), VerifyWorkspaceBytes(shape, unknown));
      for (const int packed : {4, 64, 256}) {
        EXPECT_EQ(Split(4608, known, packed).num_splits, Split(4608, unknown, packed).num_splits);
      }
    }
  }
}

TEST(ChooseVerifyConfig, CutsAPrefixAlikeWhateverTheBatch) {
  for (const int head_dim : {64, 128, 256}) {
    for (const DType cache : {DType::kBFloat16, DType::kFloat8E4M3}) {
      VerifyShape one = Shape(1, 1, 32, 8, head_dim);
      one.cache_dtype = cache;
      const VerifyConfig alone = ChooseVerifyConfig(one, kH200);
      for (const int requests : {1, 2, 32}) {
        for (const int rows : {1, 8, 16, 17, 64, 200}) {
          VerifyShape shape = Shape(requests, rows, 32, 8, head_dim);
          shape.cache_dtype = cache;
          const VerifyConfig config = ChooseVerifyConfig(shape, kH200);
          for (int tokens = 0; tokens < 100'000; tokens += 1111) {
            for (const int packed : {4, 32, 33, 64, 65, 256}) {
              ASSERT_EQ(Split(tokens, config, packed).split_tokens,
                        Split(tokens, alone, packed).split_tokens)
                  << requests << " x " << rows << " rows, " << tokens << " tokens, " << packed;
            }
          }
        }
      }
    }
  }
}

TEST(ChooseVerifyConfig, LeavesEveryWarpRoomForAGroupOfPartialResults) {
  for (const auto& [device, shape] : EveryKind({kH200, kH200WithoutWarpgroups, kA100, kL40})) {
    const int dim = shape.head_dim;
    const VerifyConfig config = ChooseVerifyConfig(shape, device);
    const int splits = config.wide_ctas > 0 ? kMaxGroupSplits : SplitsPerGroup(24);
    EXPECT_GE(splits, SplitsPerGroup(config.max_splits));
    int rows = 1;
    int warps = 0, buffer = 0;
    if (config.warpgroup) {
      rows = sm90::RowHalves(dim, config.row_tile);
      warps = sm90::ConsumerThreads(sm90::ConsumerWarpgroups(config.row_tile)) / 32;
      buffer = config.stages * 2 * sm90::KvTileBytes(dim) +
               config.raw_stages * 2 * sm90::RawTileBytes(dim) +
               sm90::QueryBytes(dim, config.row_tile);
    } else {
      warps = sm80::CtaThreads(dim, config.row_tile) / 32;
      buffer =
          config.stages * sm80::kKvWarps * sm80::StageBytes(dim, shape.cache_dtype != shape.dtype);
    }
    EXPECT_GE(buffer / warps, CombineWarpBytes(dim, rows, splits))
        << dim << ", " << shape.num_rows << " rows, SMs of " << device.smem_per_sm_bytes;
  }
}

TEST(ChooseVerifyConfig, KeepsPrefetchedStagesApartFromTheMergeBuffer) {
  for (const auto& [device, shape] : EveryKind({kH200WithoutWarpgroups, kA100, kL40})) {
    const int dim = shape.head_dim;
    const VerifyConfig config = ChooseVerifyConfig(shape, device);
    const int stage = sm80::kKvWarps * sm80::StageBytes(dim, shape.cache_dtype != shape.dtype);
    const int fixed = sm80::QueryBytes(dim, config.row_tile) + sm80::kWorkTileBytes +
                      sm80::RowStateBytes(config.row_tile) +
                      sm80::GroupOutputBytes(dim, config.row_tile);
    EXPECT_LT(config.prefetch_stages, config.stages);
    EXPECT_GE(config.prefetch_stages, 0);
    EXPECT_LE(fixed + config.stages * stage, config.smem_bytes);
    EXPECT_LE(fixed + config.prefetch_stages * stage + sm80::MergeBytes(dim, config.row_tile),
              config.smem_bytes);
    if (config.row_tile > 16) {
      EXPECT_EQ(config.prefetch_stages, 0);
    }
  }
  VerifyShape float8 = Shape(8, 1, 32, 8, 128);
  float8.cache_dtype = DType::kFloat8E4M3;
  EXPECT_EQ(ChooseVerifyConfig(float8, kH200WithoutWarpgroups).stages, 3);
  EXPECT_EQ(ChooseVerifyConfig(float8, kH200WithoutWarpgroups).prefetch_stages, 2);
}

TEST(ChooseVerifyConfig, TakesTheKernelFromDeviceAndCacheAlone) {
  for (const int rows : {1, 8, 200}) {
    EXPECT_TRUE(ChooseVerifyConfig(Shape(3, rows), kH200).warpgroup);
    EXPECT_FALSE(ChooseVerifyConfig(Shape(3, rows), kH200WithoutWarpgroups).warpgroup);
    for (const int head_dim : {64, 80, 96, 128, 192, 256}) {
      VerifyShape float8 = Shape(3, rows, 32, 8, head_dim);
      float8.cache_dtype = DType::kFloat8E4M3;
      EXPECT_EQ(ChooseVerifyConfig(float8, kH200).warpgroup, sm90::TakesFloat8(head_dim));
      EXPECT_FALSE(ChooseVerifyConfig(float8, kH200WithoutWarpgroups).warpgroup);
    }
  }
}

TEST(ChooseVerifyConfig, GivesFloat8CachesRawStagesAndTheSplitsOf16BitOnes) {
  for (const int head_dim : {64, 128}) {
    for (const int requests : {1, 8}) {
      for (const int rows : {1, 4, 5, 8, 16}) {
        const VerifyShape shape = Shape(requests, rows, 32, 8, head_dim);
        VerifyShape float8 = shape;
        float8.cache_dtype = DType::kFloat8E4M3;
        const VerifyConfig config = ChooseVerifyConfig(float8, kH200);
        const VerifyConfig other = ChooseVerifyConfig(shape, kH200);
        EXPECT_EQ(config.num_ctas, other.num_ctas) << head_dim << ", " << rows << " rows";
        EXPECT_EQ(config.row_tile, other.row_tile);
        EXPECT_GE(config.raw_stages, 2 * config.stages) << head_dim << ", " << rows << " rows";
        EXPECT_LE(config.raw_stages, sm90::kMaxRawStages);
        EXPECT_EQ(other.raw_stages, 0);
        EXPECT_EQ(config.smem_bytes, sm90::FixedBytes(head_dim, config.row_tile) +
                                         config.stages * sm90::StageBytes(head_dim) +
                                         config.raw_stages * sm90::RawStageBytes(head_dim));
        for (int tokens = 0; tokens < 100'000; tokens += 999) {
          for (const int packed : {4, 20, 32, 33, 64}) {
            EXPECT_EQ(Split(tokens, config, packed).split_tokens,
                      Split(tokens, other, packed).split_tokens);
          }
        }
      }
    }
  }
}

TEST(ChooseVerifyConfig, TakesTheSmallestRowTileThatHoldsATypicalRequest) {
  EXPECT_EQ(ChooseVerifyConfig(Shape(8, 1), kA100).row_tile, 16);
  EXPECT_EQ(ChooseVerifyConfig(Shape(8, 4), kA100).row_tile, 16);
  EXPECT_EQ(ChooseVerifyConfig(Shape(8, 8), kA100).row_tile, 32);
  EXPECT_EQ(ChooseVerifyConfig(Shape(8, 16), kH200WithoutWarpgroups).row_tile, 64);
  EXPECT_EQ(ChooseVerifyConfig(Shape(8, 4), kH200).row_tile, 16);
  EXPECT_EQ(ChooseVerifyConfig(Shape(8, 64), kH200).row_tile, 128);
}

TEST(ChooseVerifyConfig, NamesWhatIsMissing) {
  const auto reason = [](auto change) {
    VerifyShape shape = Shape(1, 8);
    change(shape);
    const char* unsupported = ChooseVerifyConfig(shape, kH200).unsupported;
    return std::string(unsupported == nullptr ? "" : unsupported);
  };
  EXPECT_EQ(reason([](VerifyShape&) {}), "");
  EXPECT_NE(reason([](VerifyShape& s) { s.head_dim = 72; }).find("head size"), std::string::npos);
  EXPECT_NE(reason([](VerifyShape& s) { s.page_size = 8; }).find("page size"), std::string::npos);
  EXPECT_NE(reason([](VerifyShape& s) { s.block_size = 8; }).find("block size"), std::string::npos);
  EXPECT_NE(reason([](VerifyShape& s) { s.num_heads = 30; }).find("heads"), std::string::npos);
  EXPECT_NE(reason([](VerifyShape& s) { s.dtype = DType::kFloat32; }).find("float16"),
            std::string::npos);
  EXPECT_NE(reason([](VerifyShape& s) { s.cache_dtype = DType::kFloat16; }).find("cache"),
            std::string::npos);
  DeviceProps old = kA100;
  old.compute_capability = 75;
  EXPECT_NE(ChooseVerifyConfig(Shape(1, 8), old).unsupported, nullptr);
}

TEST(DescribeUnsupported, NamesTheArgumentAndItsNumber) {
  const auto text = [](auto change, DeviceProps device = kH200) {
    VerifyShape shape = Shape(1, 8);
    change(shape);
    return DescribeUnsupported(shape, device);
  };
  EXPECT_EQ(text([](VerifyShape&) {}), "");
  EXPECT_EQ(text([](VerifyShape& s) { s.page_size = 24; }),
            "key_cache: got pages of 24 tokens, expected a page size that is a multiple of 16");
  EXPECT_EQ(text([](VerifyShape& s) { s.head_dim = 72; }),
            "query: got 72 channels, expected head size 64, 80, 96, 128, 192 or 256");
  EXPECT_EQ(text([](VerifyShape& s) { s.block_size = 8; }),
            "view.block_size: got 8, expected a block size that is a multiple of 16");
  EXPECT_EQ(text([](VerifyShape& s) {
              s.num_heads = 30;
              s.num_kv_heads = 8;
            }),
            "query: got 30 heads over 8 KV heads, expected query heads that are a multiple "
            "of the KV heads");
  EXPECT_EQ(text([](VerifyShape& s) { s.dtype = DType::kFloat32; }),
            "query: got dtype float32, expected float16 or bfloat16 rows");
  EXPECT_EQ(text([](VerifyShape& s) {
              s.dtype = DType::kBFloat16;
              s.cache_dtype = DType::kFloat16;
            }),
            "key_cache: got dtype float16 beside bfloat16 rows, expected a cache of the rows' "
            "type or of float8_e4m3fn");
  DeviceProps old = kA100;
  old.compute_capability = 75;
  EXPECT_EQ(text([](VerifyShape&) {}, old),
            "device: got compute capability 7.5, expected a device of compute capability 8.0 or "
            "newer");
  DeviceProps small = kA100;
  small.smem_per_block_bytes = small.smem_per_sm_bytes = 20'000;
  EXPECT_EQ(text(
                [](VerifyShape& s) {
                  s.num_heads = 32;
                  s.num_kv_heads = 8;
                  s.head_dim = 256;
                },
                small),
            "query: got 32/8 heads of 256 channels, expected a device with more shared memory "
            "per block");
}

TEST(VerifyBytes, AreFixedBySizesTheHostKnows) {
  const VerifyShape shape = Shape(32, 8);
  const VerifyConfig config = ChooseVerifyConfig(shape, kH200);
  const int64_t slots = config.max_slots + kScratchSlotsPerCta * config.num_ctas;
  EXPECT_GT(VerifyWorkspaceBytes(shape, config), slots * config.row_tile * 128 * 4);
  EXPECT_LT(VerifyWorkspaceBytes(shape, config), slots * config.row_tile * 130 * 4 + (1 << 20));
  EXPECT_GE(VerifyPlanBytes(shape, config), int64_t{sizeof(WorkTile)} * config.max_work_tiles);
  EXPECT_LT(VerifyPlanBytes(shape, config), 1 << 20);
}

TEST(VerifyBytes, BoundOutputTilesByRows) {
  // Rows of any raggedness: at most one partly filled tile per request.
  const VerifyConfig config = ChooseVerifyConfig(Shape(7, 100), kH200);
  const int worst = 6 * 1 + (700 - 6) * 4 / config.row_tile + 1;
  EXPECT_GE(config.max_output_tiles, worst * 8);
}

TEST(ChooseVerifyConfig, TakesTwoWarpgroupsForManyRowsWhereRegistersAllow) {
  for (const int head_dim : {64, 80, 96, 128}) {
    const VerifyConfig wide = ChooseVerifyConfig(Shape(1, 64, 32, 8, head_dim), kH200);
    EXPECT_EQ(wide.row_tile, 2 * sm90::kWarpgroupRows) << head_dim;
    EXPECT_EQ(wide.num_ctas, kH200.num_sms) << head_dim;
    EXPECT_LE(wide.smem_bytes, kH200.smem_per_block_bytes) << head_dim;
    EXPECT_GE(wide.stages, 4) << head_dim;
    EXPECT_EQ(wide.wide_ctas, kH200.num_sms) << head_dim;
    EXPECT_LE(ChooseVerifyConfig(Shape(1, 16, 32, 8, head_dim), kH200).row_tile,
              sm90::kWarpgroupRows);
  }
  for (const int head_dim : {192, 256}) {
    const VerifyConfig config = ChooseVerifyConfig(Shape(1, 64, 32, 8, head_dim), kH200);
    EXPECT_LE(config.row_tile, sm90::kWarpgroupRows);
    EXPECT_EQ(config.wide_ctas, 0);
  }
  VerifyShape float8 = Shape(1, 64);
  float8.cache_dtype = DType::kFloat8E4M3;
  EXPECT_LE(ChooseVerifyConfig(float8, kH200).row_tile, 64);
}

TEST(SplitWidePrefix, GivesOneRequestAWorkTileForEveryCtaAndNoMore) {
  constexpr int kOutputTiles = 16;  // 8 KV heads, 256 packed rows
  for (const int tokens : {4608, 32768, 131072, 1 << 20}) {
    const PrefixSplits kv_splits = SplitWidePrefix(tokens, kOutputTiles, kH200.num_sms);
    EXPECT_EQ(kv_splits.num_splits, 8) << tokens;
    EXPECT_LE(kv_splits.num_splits * kOutputTiles, kH200.num_sms) << tokens;
  }
  EXPECT_EQ(SplitWidePrefix(600, kOutputTiles, kH200.num_sms).num_splits, 2);
  EXPECT_EQ(SplitWidePrefix(100000, 500, kH200.num_sms).num_splits, 1);
}

}  // namespace
}  // namespace nwor
