#include "attention/heuristics.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <queue>
#include <random>
#include <string>
#include <vector>

#include "attention/plan.h"
#include "attention/tile_shape.h"

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

TEST(SplitPrefix, CoversTheSpanWithLeavesOfWholeSteps) {
  std::random_device device;
  const char* given = std::getenv("NWOR_TEST_SEED");
  const unsigned seed = given != nullptr ? std::strtoul(given, nullptr, 10) : device();
  std::cout << "seed=" << seed << "\n";
  std::mt19937 random(seed);
  for (int i = 0; i < 20000; ++i) {
    const int bits = std::uniform_int_distribution<>(0, 20)(random);
    const int tokens = std::uniform_int_distribution<>(0, 1 << bits)(random);
    const int max_leaves = std::uniform_int_distribution<>(1, 64)(random);
    const LeafSplit split = SplitPrefix(tokens, max_leaves);
    ASSERT_GE(split.num_leaves, 1);
    ASSERT_LE(split.num_leaves, max_leaves);
    ASSERT_EQ(split.leaf_tokens % kLeafAlign, 0);
    const int64_t covered = int64_t{split.leaf_tokens} * split.num_leaves;
    ASSERT_GE(covered, tokens);
    if (split.num_leaves > 1) {
      ASSERT_LT(covered - split.leaf_tokens, tokens)
          << "the last leaf of " << tokens << " is empty";
    }
  }
}

TEST(SplitPrefix, KeepsAnEmptyPrefixAsOneLeafForTheInFlightRows) {
  EXPECT_EQ(SplitPrefix(0, 16).num_leaves, 1);
  EXPECT_GT(SplitPrefix(0, 16).leaf_tokens, 0);
}

TEST(SplitPrefix, FillsTheDeviceOnceForOneLongRequest) {
  const VerifyConfig config = ChooseVerifyConfig(Shape(1, 8), kH200);
  const int items = SplitPrefix(32768, config.max_leaves).num_leaves * 8;
  EXPECT_GT(items, kH200.num_sms * 9 / 10);
  EXPECT_LE(items, config.num_ctas);
}

TEST(SplitPrefix, HoldsForAMillionTokens) {
  const LeafSplit split = SplitPrefix(1 << 20, 16);
  EXPECT_EQ(split.num_leaves, 16);
  EXPECT_EQ(split.leaf_tokens, 1 << 16);
}

// Grains of `requests` alike: 8 KV heads, one row tile each.
std::vector<ItemGrain> Grains(int requests, int tokens, const VerifyConfig& config) {
  const LeafSplit split = SplitPrefix(tokens, config.max_leaves);
  std::vector<ItemGrain> grains;
  for (int b = 0; b < requests; ++b) {
    const int64_t work = int64_t{tokens} * 8 * (requests - b);
    grains.push_back(
        ChooseGrain(work, tokens, int64_t{kLeafGroup} * split.leaf_tokens, config.num_ctas));
  }
  return grains;
}

TEST(ChooseGrain, IsFineForFewRequestsAndGoesFromCoarseToFineForMany) {
  const VerifyConfig config = ChooseVerifyConfig(Shape(1, 8), kH200);
  EXPECT_EQ(Grains(1, 32768, config).front(), ItemGrain::kLeaf);
  EXPECT_EQ(Grains(32, 32768, config).front(), ItemGrain::kLeafGroup);
  EXPECT_EQ(Grains(500, 32768, config).front(), ItemGrain::kRequest);
  for (const int requests : {1, 5, 32, 100, 500}) {
    const std::vector<ItemGrain> grains = Grains(requests, 32768, config);
    EXPECT_EQ(grains.back(), ItemGrain::kLeaf);
    EXPECT_TRUE(std::is_sorted(grains.rbegin(), grains.rend()));
  }
}

TEST(ChooseGrain, StaysWithinTheSlotsOfTheWorkspace) {
  for (const int tokens : {513, 2048, 4608, 32768, 131072, 1 << 20}) {
    for (int requests = 1; requests < 2000; requests = requests * 5 / 4 + 1) {
      const VerifyConfig config = ChooseVerifyConfig(Shape(requests, 8), kH200);
      const int64_t leaves = SplitPrefix(tokens, config.max_leaves).num_leaves;
      const int64_t groups = (leaves + kLeafGroup - 1) / kLeafGroup;
      int64_t slots = 0;
      for (const ItemGrain grain : Grains(requests, tokens, config)) {
        if (grain == ItemGrain::kLeaf && leaves > 1) slots += 8 * leaves;
        if (grain == ItemGrain::kLeafGroup && groups > 1) slots += 8 * groups;
      }
      EXPECT_LE(slots, config.max_slots) << requests << " x " << tokens;
    }
  }
}

TEST(ChooseGrain, EndsEvenlyForBatchesThatDoNotFitTheDevice) {
  // The queue's list schedule of equal-speed CTAs, against a perfect division of the work.
  const VerifyConfig config = ChooseVerifyConfig(Shape(1, 8), kH200);
  const LeafSplit split = SplitPrefix(32768, config.max_leaves);
  for (int requests = 4; requests <= 40; ++requests) {
    std::vector<int> items;
    for (const ItemGrain grain : Grains(requests, 32768, config)) {
      const int leaves = grain == ItemGrain::kLeaf        ? 1
                         : grain == ItemGrain::kLeafGroup ? kLeafGroup
                                                          : split.num_leaves;
      for (int i = 0; i < 8 * split.num_leaves / leaves; ++i) items.push_back(leaves);
    }
    std::sort(items.rbegin(), items.rend());
    std::priority_queue<int, std::vector<int>, std::greater<>> busy_until;
    for (int i = 0; i < config.num_ctas; ++i) busy_until.push(0);
    int end = 0;
    for (const int leaves : items) {
      const int done = busy_until.top() + leaves;
      busy_until.pop();
      busy_until.push(done);
      end = std::max(end, done);
    }
    const double ideal = 8.0 * requests * split.num_leaves / config.num_ctas;
    EXPECT_LE(end, ideal + 1.5) << requests << " requests";
  }
}

TEST(ChooseVerifyConfig, FitsSharedMemoryForEveryHeadSizeTypeAndDevice) {
  for (const DeviceProps& device : {kH200, kH200WithoutWarpgroups, kA100, kL40}) {
    for (const int head_dim : {64, 80, 96, 128, 192, 256}) {
      for (const DType cache : {DType::kBFloat16, DType::kFloat8E4M3}) {
        for (const int rows : {1, 4, 8, 16, 64, 256}) {
          VerifyShape shape = Shape(4, rows, 32, 8, head_dim);
          shape.cache_dtype = cache;
          const VerifyConfig config = ChooseVerifyConfig(shape, device);
          ASSERT_EQ(config.unsupported, nullptr) << head_dim << " " << config.unsupported;
          EXPECT_LE(config.smem_bytes, device.smem_per_block_bytes);
          EXPECT_GE(config.stages, 1);
          EXPECT_EQ(config.num_ctas % device.num_sms, 0);
          const int ctas_per_sm = config.num_ctas / device.num_sms;
          EXPECT_LE(ctas_per_sm * (config.smem_bytes + 1024), device.smem_per_sm_bytes);
        }
      }
    }
  }
}

TEST(ChooseVerifyConfig, TakesTheKernelFromTheDeviceAlone) {
  for (const int rows : {1, 8, 200}) {
    EXPECT_TRUE(ChooseVerifyConfig(Shape(3, rows), kH200).warpgroup);
    EXPECT_FALSE(ChooseVerifyConfig(Shape(3, rows), kH200WithoutWarpgroups).warpgroup);
  }
}

TEST(ChooseVerifyConfig, TakesTheSmallestRowTileThatHoldsATypicalRequest) {
  EXPECT_EQ(ChooseVerifyConfig(Shape(8, 1), kA100).row_tile, 16);
  EXPECT_EQ(ChooseVerifyConfig(Shape(8, 4), kA100).row_tile, 16);
  EXPECT_EQ(ChooseVerifyConfig(Shape(8, 8), kA100).row_tile, 32);
  EXPECT_EQ(ChooseVerifyConfig(Shape(8, 16), kH200WithoutWarpgroups).row_tile, 64);
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

TEST(VerifyBytes, AreFixedBySizesTheHostKnows) {
  const VerifyShape shape = Shape(32, 8);
  const VerifyConfig config = ChooseVerifyConfig(shape, kH200);
  const int64_t slots = config.max_slots + 2 * config.num_ctas;
  EXPECT_GT(VerifyWorkspaceBytes(shape, config), slots * config.row_tile * 128 * 4);
  EXPECT_LT(VerifyWorkspaceBytes(shape, config), slots * config.row_tile * 130 * 4 + (1 << 20));
  EXPECT_GE(VerifyPlanBytes(shape, config), int64_t{sizeof(PlanItem)} * config.max_items);
  EXPECT_LT(VerifyPlanBytes(shape, config), 1 << 20);
}

TEST(VerifyBytes, BoundPairsByRows) {
  // Rows of any raggedness: at most one partly filled tile per request.
  const VerifyConfig config = ChooseVerifyConfig(Shape(7, 100), kH200);
  const int worst = 6 * 1 + (700 - 6) * 4 / 64 + 1;
  EXPECT_GE(config.max_pairs, worst * 8);
}

}  // namespace
}  // namespace nwor
