#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "base/row_op.h"
#include "kv_interceptor/commit/commit.h"
#include "kv_interceptor/commit/grid.h"

// The host side of the kernels' choices: vector widths, divisions, grids. No GPU needed.

namespace nwor {
namespace {

Alignment AlignedTo(uint64_t bytes) { return {bytes}; }

TEST(RowOp, TakesTheWidestVectorThatEverythingAllows) {
  const auto copy = [](uint64_t rows, uint64_t cache) {
    return ChooseRowOp(DType::kBFloat16, DType::kBFloat16, AlignedTo(rows), AlignedTo(cache));
  };
  EXPECT_EQ(copy(0, 0), RowOp::kCopy16);
  EXPECT_EQ(copy(32, 48), RowOp::kCopy16);
  EXPECT_EQ(copy(16, 8), RowOp::kCopy8);
  EXPECT_EQ(copy(20, 64), RowOp::kCopy4);
  EXPECT_EQ(copy(64, 2), RowOp::kCopy2);
}

TEST(RowOp, QuantisesEightChannelsAtATimeOnlyWhenBothSidesAllow) {
  const auto quantize = [](DType dtype, uint64_t rows, uint64_t cache) {
    return ChooseRowOp(dtype, DType::kFloat8E4M3, AlignedTo(rows), AlignedTo(cache));
  };
  EXPECT_EQ(quantize(DType::kBFloat16, 16, 8), RowOp::kQuantizeBFloat16x8);
  EXPECT_EQ(quantize(DType::kBFloat16, 8, 8), RowOp::kQuantizeBFloat16x1);
  EXPECT_EQ(quantize(DType::kFloat16, 16, 4), RowOp::kQuantizeHalfx1);
  EXPECT_EQ(quantize(DType::kFloat16, 0, 0), RowOp::kQuantizeHalfx8);
  EXPECT_EQ(quantize(DType::kFloat32, 32, 8), RowOp::kQuantizeFloatx8);
  EXPECT_EQ(quantize(DType::kFloat32, 32, 4), RowOp::kQuantizeFloatx1);
}

TEST(RowOp, AlignmentSeesPointersAndStrides) {
  Alignment alignment;
  alignment.Add(reinterpret_cast<void*>(uintptr_t{0x1000}));
  alignment.AddElements({128, 1024}, DType::kBFloat16);
  EXPECT_TRUE(alignment.Allows(16));
  alignment.AddElements({4}, DType::kBFloat16);
  EXPECT_FALSE(alignment.Allows(16));
  EXPECT_TRUE(alignment.Allows(8));
  alignment.Add(reinterpret_cast<void*>(uintptr_t{0x1002}));
  EXPECT_TRUE(alignment.Allows(2));
  EXPECT_FALSE(alignment.Allows(4));
}

TEST(RowShape, VectorsFillEachHeadExactly) {
  for (const RowOp op : {RowOp::kCopy16, RowOp::kCopy8, RowOp::kCopy4, RowOp::kCopy2,
                         RowOp::kQuantizeBFloat16x8, RowOp::kQuantizeBFloat16x1}) {
    for (const int dim : {64, 80, 96, 128, 192, 256}) {
      const RowShape shape = ShapeOf(op, 5, dim, DType::kBFloat16);
      EXPECT_EQ(shape.vectors_per_head * VectorBytes(op).row, dim * 2);
      EXPECT_EQ(shape.vectors_per_row, 5 * shape.vectors_per_head);
    }
  }
}

TEST(SmallDivisor, DividesAsDivisionDoes) {
  for (uint32_t divisor : {1u, 2u, 3u, 5u, 7u, 8u, 10u, 12u, 16u, 24u, 48u, 127u, 256u, 8192u}) {
    const SmallDivisor by = SmallDivisor::By(divisor);
    for (uint64_t n = 0; n * divisor < (uint64_t{1} << 32) && n < 100'000; ++n) {
      const auto quotient =
          by.multiplier == 0 ? n : (n * by.multiplier) >> 32;  // what __umulhi computes
      ASSERT_EQ(quotient, n / divisor) << n << " / " << divisor;
    }
  }
}

TEST(ExactLog2, OfPowersOfTwoOnly) {
  EXPECT_EQ(ExactLog2(1), 0);
  EXPECT_EQ(ExactLog2(16), 4);
  EXPECT_EQ(ExactLog2(int64_t{1} << 40), 40);
  EXPECT_EQ(ExactLog2(24), -1);
  EXPECT_EQ(ExactLog2(0), -1);
}

TEST(CommitGrid, LargestBatchFitsEverySupportedDevice) {
  constexpr int64_t kSharedOfSm89 = 99 * 1024, kBlockState = 18 * 1024;  // with summaries' stages
  EXPECT_LE(ChooseCommitCells(kMaxCommitRows) * 4 + kBlockState, kSharedOfSm89);
}

TEST(CommitGrid, SlotTableAlwaysHasEmptyCells) {
  for (int entries = 0; entries <= kMaxCommitRows; ++entries) {
    ASSERT_GT(ChooseCommitCells(entries), entries);
  }
}

TEST(CommitGrid, FillsTheDeviceButNotMore) {
  constexpr int kSms = 132, kBlocks = 4;
  // 32 layers, 8 tokens: one slice each; two blocks per plane use nearly every SM.
  EXPECT_EQ(ChooseCommitSplits(64, 8, kSms, kBlocks), 2);
  EXPECT_EQ(ChooseCommitSplits(64, 64, kSms, kBlocks), 8);
  EXPECT_EQ(ChooseCommitSplits(64, 1, kSms, kBlocks), 1);
  EXPECT_EQ(ChooseCommitSplits(512, 8192, kSms, kBlocks), 1);
  for (int planes : {2, 6, 60, 64, 160, 512}) {
    for (int64_t slices : {1, 7, 64, 8192, 1'000'000}) {
      const int splits = ChooseCommitSplits(planes, slices, kSms, kBlocks);
      EXPECT_GE(splits, 1);
      if (splits > 1) {
        EXPECT_LE(int64_t{planes} * splits, kSms * kBlocks);
      }
    }
  }
}

TEST(CommitGrid, FewerWarpsForRowsNeedMoreSplits) {
  constexpr int kSms = 132, kBlocks = 4;
  EXPECT_EQ(ChooseCommitSplits(64, 56, kSms, kBlocks, 8), 7);
  EXPECT_EQ(ChooseCommitSplits(64, 56, kSms, kBlocks, 7), 8);
  EXPECT_EQ(ChooseCommitSplits(64, 63, kSms, kBlocks, 7), 8);  // as many as are resident
}

TEST(CommitGrid, UnitsOfAUsualCommit) {
  // 8 requests of 8 rows: half of 64 rows accepted, two blocks of 16 tokens, 8 heads.
  EXPECT_EQ(ExpectSummaryUnits(8, 7, 16, 8), 16);
  EXPECT_EQ(ExpectSummaryUnits(1, 7, 16, 8), 8);  // at least one block
  EXPECT_EQ(ExpectSummaryUnits(1, 0, 16, 2), 2);
  EXPECT_EQ(ExpectSummaryUnits(0, 7, 16, 8), 0);
  EXPECT_EQ(ExpectSummaryUnits(kMaxCommitRows, 0, 1, 256), int64_t{kMaxCommitRows} / 2 * 256);
}

TEST(CommitGrid, SummariesTakeWarpsThatRowsCanSpare) {
  constexpr int kSms = 132, kBlocks = 4;
  const auto choose = [](int planes, int64_t slices, int64_t units) {
    const SummaryGrid grid = ChooseSummaryGrid(planes, slices, units, kSms, kBlocks);
    return std::pair(grid.splits, grid.warps);
  };
  // 32 layers, requests of 8 rows with 7 drafts each, 8 units for every 16 rows that are accepted.
  EXPECT_EQ(choose(64, 7, 8), std::pair(2, 2));
  EXPECT_EQ(choose(64, 7, 4), std::pair(2, 1));
  EXPECT_EQ(choose(64, 14, 8), std::pair(3, 2));  // 14 slices fill 7 warps of two blocks
  EXPECT_EQ(choose(64, 28, 8), std::pair(4, 1));
  EXPECT_EQ(choose(64, 56, 16), std::pair(8, 1));
  EXPECT_EQ(choose(64, 63, 24), std::pair(8, 2));   // all in two turns, whoever takes units
  EXPECT_EQ(choose(64, 56, 100), std::pair(8, 1));  // more units than warps
  for (int planes : {2, 6, 60, 64, 160, 512, 1024}) {
    for (int64_t slices : {1, 7, 13, 56, 64, 1024}) {
      for (int64_t units : {0, 1, 9, 64, 100'000}) {
        const auto [splits, warps] = choose(planes, slices, units);
        const int fewest = ChooseCommitSplits(planes, slices, kSms, kBlocks, kCommitWarps - 1);
        const auto turns = [slices](int64_t num_warps) {
          return (slices + num_warps - 1) / num_warps;
        };
        EXPECT_GE(splits, fewest);
        EXPECT_GE(warps, 1);
        EXPECT_LE(warps, kMaxSummaryWarps);
        EXPECT_LE(turns(splits * (kCommitWarps - warps)), turns(fewest * (kCommitWarps - 1)))
            << planes << ' ' << slices << ' ' << units;
        if (splits > 1) {
          EXPECT_LE(planes * splits, kSms * kBlocks);
        }
      }
    }
  }
}

}  // namespace
}  // namespace nwor
