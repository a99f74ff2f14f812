#include "kv_interceptor/stage/stage.h"

#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "kv_interceptor/commit/error.h"
#include "kv_interceptor/staging_buffer.h"

// The write of one layer over plain host memory, and the memory that staging takes.

namespace nwor {
namespace {

constexpr int kPages = 2, kPageSize = 4, kDim = 8, kRows = 4, kStagingRows = 2;

// Four rows: the first goes to the cache, the next two to staging, the last nowhere.
class Stage : public ::testing::Test {
 protected:
  Stage() {
    for (size_t i = 0; i < rows_.size(); ++i) rows_[i] = static_cast<float>(i + 1);
    params_.rows = {rows_.data(), rows_.data(), kDim, kDim, kDim, kDim};
    params_.staged = {staged_.data(), staged_.data(), kDim, kDim, kDim, kDim};
    params_.cache.key = keys_.data();
    params_.cache.value = values_.data();
    CacheGeometry& geometry = params_.cache.geometry;
    geometry.num_pages = kPages;
    geometry.page_size = kPageSize;
    geometry.num_heads = 1;
    geometry.head_dim = kDim;
    geometry.dtype = params_.dtype = DType::kFloat32;
    geometry.key = geometry.value = {kPageSize * kDim, kDim, kDim};
    params_.slot_mapping = slots_.data();
    params_.stage_rows = stage_rows_.data();
    params_.num_rows = kRows;
    params_.num_staging_rows = kStagingRows;
    params_.exclusive = true;
    params_.group_slots = group_slots_.data();
    params_.status = status_.data();
  }
  float Staged(int row) const { return staged_[row * kDim]; }
  float Cached(int slot) const { return keys_[slot * kDim]; }

  std::array<float, kRows * kDim> rows_{};
  std::array<float, kStagingRows * kDim> staged_{};
  std::array<float, kPages * kPageSize * kDim> keys_{}, values_{};
  std::array<int64_t, kRows> slots_{1, 5, 6, -1};
  std::array<int32_t, kRows> stage_rows_{-1, 0, 1, -1};
  std::array<int64_t, kStagingRows> group_slots_{kNoSlot, kNoSlot};
  std::array<int64_t, kNumStatusWords> status_{};
  StageParams params_;
};

TEST_F(Stage, RecordsTheSlotsOfTheFirstLayer) {
  StageCpu(params_);
  EXPECT_EQ(status_[kStatusCode], 0);
  EXPECT_EQ(group_slots_, (std::array<int64_t, kStagingRows>{5, 6}));
  EXPECT_EQ(Cached(1), rows_[0]);
  EXPECT_EQ(Cached(5), 0);
  EXPECT_EQ(Staged(0), rows_[kDim]);
  EXPECT_EQ(Staged(1), rows_[2 * kDim]);
}

TEST_F(Stage, LeavesOutARowWhoseSlotIsAnotherThanInTheLayerBefore) {
  group_slots_ = {5, 7};
  StageCpu(params_);
  EXPECT_EQ(status_[kStatusCode], static_cast<int64_t>(CommitError::kSlotMismatch));
  EXPECT_EQ(status_[kStatusRequest], 2);
  EXPECT_EQ(status_[kStatusValue], 6);
  EXPECT_EQ(group_slots_, (std::array<int64_t, kStagingRows>{5, 7}));
  EXPECT_EQ(Staged(0), rows_[kDim]);
  EXPECT_EQ(Staged(1), 0);
}

TEST_F(Stage, OverwritesTheSlotsOfAnEarlierRound) {
  group_slots_ = {5, 7};
  params_.records = true;
  StageCpu(params_);
  EXPECT_EQ(status_[kStatusCode], 0);
  EXPECT_EQ(group_slots_, (std::array<int64_t, kStagingRows>{5, 6}));
}

TEST(StagingBuffer, TakesNoMoreBytesThanItMay) {
  StagingBuffer buffer(1, kDim, at::kFloat, at::kCPU);
  buffer.AddLayer();
  EXPECT_EQ(buffer.Reserve(10, buffer.BytesFor(10) - 1), BypassReason::kCapacity);
  EXPECT_EQ(buffer.memory_bytes(), 0);
  EXPECT_EQ(buffer.Reserve(10, buffer.BytesFor(10)), BypassReason::kNone);
  EXPECT_EQ(buffer.memory_bytes(), buffer.BytesFor(10));
  // It doubles where there is room, and takes what it needs where there is not.
  EXPECT_EQ(buffer.Reserve(11, buffer.BytesFor(15)), BypassReason::kNone);
  EXPECT_EQ(buffer.capacity_rows(), 11);
  EXPECT_EQ(buffer.Reserve(12, buffer.BytesFor(22)), BypassReason::kNone);
  EXPECT_EQ(buffer.capacity_rows(), 22);
}

TEST(StagingBuffer, HasNothingHalfMadeWhenMemoryRunsOut) {
  StagingBuffer buffer(1, kDim, at::kFloat, at::kCPU);
  buffer.AddLayer();
  ASSERT_EQ(buffer.Reserve(4, INT64_MAX), BypassReason::kNone);
  EXPECT_EQ(buffer.Reserve(int64_t{1} << 50, INT64_MAX), BypassReason::kOutOfMemory);
  EXPECT_EQ(buffer.capacity_rows(), 0);
  EXPECT_EQ(buffer.memory_bytes(), 0);
  EXPECT_EQ(buffer.Reserve(5, INT64_MAX), BypassReason::kNone);
  EXPECT_EQ(buffer.memory_bytes(), buffer.BytesFor(5));
}

}  // namespace
}  // namespace nwor
