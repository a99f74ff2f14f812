#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>

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
  constexpr int64_t kSharedOfSm89 = 99 * 1024, kBlockState = 1024;
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

}  // namespace
}  // namespace nwor
