#include "kv_interceptor/commit/commit.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

// Commits over plain host memory: no torch, no interceptor. Every test compares whole caches.

namespace nwor {
namespace {

constexpr int kLayers = 4, kPages = 6, kPageSize = 4, kHeads = 2, kDim = 8, kRows = 6;
constexpr int kRowFloats = kHeads * kDim;

// Throws at the n-th row it is asked to write, and every time after when `forever`.
class FailingWriter final : public CacheWriter {
 public:
  FailingWriter(int fail_at, bool forever) : fail_at_(fail_at), forever_(forever) {}
  void WriteRow(const CacheLayout& cache, int64_t slot, const KvRowsView& row,
                DType row_dtype) override {
    const int call = calls_++;
    if (call == fail_at_ || (forever_ && call > fail_at_)) {
      // Leaves a torn row behind: K of the destination is half written, V is not.
      const int64_t page = slot / kPageSize, token = slot % kPageSize;
      std::memset(static_cast<float*>(cache.key) + (page * kPageSize + token) * kRowFloats, 0x5a,
                  kRowFloats * 2);
      if (fail_at_ % 2 == 1) throw call;  // NOLINT(bugprone-std-exception-baseclass)
      throw std::runtime_error("injected");
    }
    PlainCacheWriter().WriteRow(cache, slot, row, row_dtype);
  }

 private:
  int fail_at_, calls_ = 0;
  bool forever_;
};

class Commit : public ::testing::Test {
 protected:
  Commit() {
    std::mt19937 random(7);
    const auto fill = [&](std::vector<float>& memory, size_t size) {
      memory.resize(size);
      for (float& x : memory) x = static_cast<float>(random() % 100000);
    };
    fill(staged_keys_, kLayers * kRows * kRowFloats);
    fill(staged_values_, kLayers * kRows * kRowFloats);
    fill(keys_, kLayers * kPages * kPageSize * kRowFloats);
    fill(values_, kLayers * kPages * kPageSize * kRowFloats);
    before_keys_ = keys_;
    before_values_ = values_;

    CommitGroup& group = params_.groups[0];
    group.staged = {staged_keys_.data(), staged_values_.data(), kRowFloats, kDim, kRowFloats, kDim};
    group.staged_key_layer = group.staged_value_layer = kRows * kRowFloats;
    group.dtype = group.geometry.dtype = DType::kFloat32;
    group.geometry.num_pages = kPages;
    group.geometry.page_size = kPageSize;
    group.geometry.num_heads = kHeads;
    group.geometry.head_dim = kDim;
    group.geometry.key = group.geometry.value = {kPageSize * kRowFloats, kRowFloats, kDim};
    params_.num_groups = 1;
    params_.num_layers = kLayers;
    for (int layer = 0; layer < kLayers; ++layer) {
      const size_t at = size_t{kPages} * kPageSize * kRowFloats * layer;
      params_.layers[layer] = {keys_.data() + at, values_.data() + at, {}, 0, layer};
    }
    params_.num_staging_rows = kRows;
    params_.status = status_.data();
    Accept({{0, 1, 2}, {3, 4, -1}}, {3, 2}, {{5, 6, 7}, {20, 21, -1}});
  }

  void Accept(std::vector<std::vector<int>> path, std::vector<int> counts,
              std::vector<std::vector<int64_t>> slots) {
    path_.clear();
    slots_.clear();
    for (const auto& row : path) path_.insert(path_.end(), row.begin(), row.end());
    for (const auto& row : slots) slots_.insert(slots_.end(), row.begin(), row.end());
    counts_.assign(counts.begin(), counts.end());
    params_.num_requests = static_cast<int>(path.size());
    params_.depth = static_cast<int>(path[0].size());
    params_.path = path_.data();
    params_.counts = counts_.data();
    params_.groups[0].slots = slots_.data();
  }

  void ExpectUnchanged() {
    EXPECT_EQ(keys_, before_keys_);
    EXPECT_EQ(values_, before_values_);
  }

  // What the caches must hold, built slot by slot.
  void ExpectCommitted(const std::vector<std::pair<int, int64_t>>& row_to_slot) {
    std::vector<float> keys = before_keys_, values = before_values_;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (const auto& [row, slot] : row_to_slot) {
        for (int i = 0; i < kRowFloats; ++i) {
          const size_t to = (size_t{kPages} * kPageSize * layer + slot) * kRowFloats + i;
          const size_t from = (size_t{kRows} * layer + row) * kRowFloats + i;
          keys[to] = staged_keys_[from];
          values[to] = staged_values_[from];
        }
      }
    }
    EXPECT_EQ(keys_, keys);
    EXPECT_EQ(values_, values);
  }

  CommitVerdict Run() { return CommitCpu(params_, log_); }

  void ExpectRefused(CommitError error, int64_t request, int64_t index, int64_t value) {
    const CommitVerdict verdict = Run();
    EXPECT_EQ(Label(verdict.error), Label(error));
    EXPECT_EQ(verdict.request, request);
    EXPECT_EQ(verdict.index, index);
    EXPECT_EQ(verdict.value, value);
    EXPECT_EQ(status_[kStatusCode], static_cast<int64_t>(error));
    EXPECT_EQ(status_[kStatusRequest], request);
    EXPECT_EQ(status_[kStatusCommitted], 0);
    ExpectUnchanged();
  }

  std::vector<float> staged_keys_, staged_values_, keys_, values_, before_keys_, before_values_;
  std::vector<int32_t> path_, counts_;
  std::vector<int64_t> slots_;
  std::vector<int64_t> status_ = std::vector<int64_t>(kNumStatusWords, -7);
  CommitParams params_;
  CommitUndoLog log_;
};

TEST_F(Commit, WritesAcceptedRowsOfEveryLayerAndNothingElse) {
  EXPECT_EQ(Run().error, CommitError::kOk);
  ExpectCommitted({{0, 5}, {1, 6}, {2, 7}, {3, 20}, {4, 21}});
  EXPECT_EQ(status_[kStatusCommitted], 5);
}

TEST_F(Commit, IgnoresPathAndSlotsBeyondTheCount) {
  Accept({{0, 99, -5}}, {1}, {{3, -9, 1 << 20}});
  EXPECT_EQ(Run().error, CommitError::kOk);
  ExpectCommitted({{0, 3}});
}

TEST_F(Commit, AcceptsNothingWithoutAByteChanged) {
  Accept({{0, 1}}, {0}, {{3, 4}});
  EXPECT_EQ(Run().error, CommitError::kOk);
  ExpectUnchanged();
}

TEST_F(Commit, LeavesEveryByteUnchangedWhenOneDestinationRepeats) {
  Accept({{0, 1}, {3, 4}}, {2, 2}, {{5, 6}, {20, 5}});
  ExpectRefused(CommitError::kDuplicateSlot, 1, 1, 5);
}

TEST_F(Commit, RefusesSlotsOutsideTheCache) {
  Accept({{0, 1}}, {2}, {{5, kPages * kPageSize}});
  ExpectRefused(CommitError::kSlotRange, 0, 1, kPages * kPageSize);
  Accept({{0, 1}}, {2}, {{-1, 5}});
  ExpectRefused(CommitError::kSlotRange, 0, 0, -1);
}

TEST_F(Commit, RefusesCountsBeyondTheDepthAndBelowZero) {
  Accept({{0, 1}, {3, 4}}, {2, 3}, {{5, 6}, {20, 21}});
  ExpectRefused(CommitError::kCountRange, 1, 0, 3);
  Accept({{0, 1}}, {-1}, {{5, 6}});
  ExpectRefused(CommitError::kCountRange, 0, 0, -1);
}

TEST_F(Commit, RefusesRowsOutsideStaging) {
  Accept({{0, kRows}}, {2}, {{5, 6}});
  ExpectRefused(CommitError::kPathRange, 0, 1, kRows);
  Accept({{-1, 0}}, {2}, {{5, 6}});
  ExpectRefused(CommitError::kPathRange, 0, 0, -1);
}

TEST_F(Commit, RefusesAPathThatDoesNotAscend) {
  Accept({{1, 0}}, {2}, {{5, 6}});
  ExpectRefused(CommitError::kNotAChain, 0, 1, 0);
  Accept({{1, 1}}, {2}, {{5, 6}});
  ExpectRefused(CommitError::kNotAChain, 0, 1, 1);
}

TEST_F(Commit, FollowsParentLinksOfATree) {
  // 0 and 1 hang on the root, 2 on 0, 3 on 1, 4 on 2.
  const std::vector<int32_t> parents = {-1, -1, 0, 1, 2, 3};
  params_.parents = parents.data();
  Accept({{0, 3}}, {2}, {{5, 6}});
  ExpectRefused(CommitError::kNotAChain, 0, 1, 3);
  Accept({{2, 4}}, {2}, {{5, 6}});
  ExpectRefused(CommitError::kNotAChain, 0, 0, 2);
  Accept({{0, 2, 4}}, {3}, {{5, 6, 7}});
  EXPECT_EQ(Run().error, CommitError::kOk);
  ExpectCommitted({{0, 5}, {2, 6}, {4, 7}});
}

TEST_F(Commit, RefusesARowOfAnotherRequest) {
  const std::vector<int32_t> request_rows = {0, 3, 6};
  params_.request_rows = request_rows.data();
  Accept({{0, 3}, {4, -1}}, {2, 1}, {{5, 6}, {20, 21}});
  ExpectRefused(CommitError::kPathRange, 0, 1, 3);
}

TEST_F(Commit, ContinuesAChunkOnlyFromWhereTheLastOneEnded) {
  const std::vector<int32_t> parents = {-1, 0, 1, 2, 3, 4};
  std::vector<int32_t> tips = {-1};
  params_.parents = parents.data();
  params_.tips = tips.data();
  Accept({{0, 1}}, {2}, {{5, 6}});
  EXPECT_EQ(Run().error, CommitError::kOk);
  EXPECT_EQ(tips[0], 1);
  before_keys_ = keys_;
  before_values_ = values_;
  Accept({{3, 4}}, {2}, {{7, 8}});
  ExpectRefused(CommitError::kNotAChain, 0, 0, 3);
  EXPECT_EQ(tips[0], 1);
  Accept({{2, 3}}, {2}, {{7, 8}});
  EXPECT_EQ(Run().error, CommitError::kOk);
  EXPECT_EQ(tips[0], 3);
  ExpectCommitted({{2, 7}, {3, 8}});
}

TEST_F(Commit, SendsRowsToTheSlotsTheyWereWrittenWithWhenNoneAreGiven) {
  const std::vector<int64_t> row_slots = {9, 10, 11, 12, 13, 14};
  params_.groups[0].slots = nullptr;
  params_.groups[0].row_slots = row_slots.data();
  EXPECT_EQ(Run().error, CommitError::kOk);
  ExpectCommitted({{0, 9}, {1, 10}, {2, 11}, {3, 12}, {4, 13}});
}

TEST_F(Commit, MapsBatchRowsAndRequestRowsToStaging) {
  // Request 0 has batch rows 0..3 (root and drafts 0..2), request 1 rows 4..6.
  const std::vector<int32_t> row_map = {-1, 0, 1, 2, -1, 3, 4}, row_base = {0, 4};
  params_.row_map = row_map.data();
  params_.num_map_rows = 7;
  Accept({{1, 2}, {5, -1}}, {2, 1}, {{5, 6}, {20, -1}});
  EXPECT_EQ(Run().error, CommitError::kOk);
  ExpectCommitted({{0, 5}, {1, 6}, {3, 20}});
  Accept({{0, 1}, {5, -1}}, {2, 1}, {{5, 6}, {20, -1}});  // row 0 is a root, not a draft
  EXPECT_EQ(Label(Run().error), Label(CommitError::kPathRange));
  params_.row_base = row_base.data();
  Accept({{1, 2}, {1, -1}}, {2, 1}, {{5, 6}, {20, -1}});
  EXPECT_EQ(Run().error, CommitError::kOk);
  ExpectCommitted({{0, 5}, {1, 6}, {3, 20}});
}

TEST_F(Commit, RefusesWhenAWriteOfTheRoundHadAFault) {
  std::vector<int64_t> round_status(kNumStatusWords, 0);
  round_status[kStatusCode] = static_cast<int64_t>(CommitError::kSlotMismatch);
  round_status[kStatusRequest] = 2;
  round_status[kStatusValue] = 17;
  params_.round_status = round_status.data();
  ExpectRefused(CommitError::kSlotMismatch, 2, 0, 17);
}

TEST_F(Commit, RefusesWhenRanksDisagree) {
  std::vector<int64_t> agreement(2);
  CommitDigestCpu(params_, agreement.data());
  params_.agreement = agreement.data();
  const int64_t digest = agreement[0];
  agreement[1] = ~(digest - 1);  // another rank had a smaller digest
  ExpectRefused(CommitError::kRankDisagreement, 0, 0, digest);
  agreement[1] = ~digest;
  EXPECT_EQ(Run().error, CommitError::kOk);
}

TEST_F(Commit, DigestSeesCountsRowsAndSlots) {
  int64_t first[2], other[2];
  CommitDigestCpu(params_, first);
  EXPECT_EQ(first[1], ~first[0]);
  --counts_[1];
  CommitDigestCpu(params_, other);
  EXPECT_NE(first[0], other[0]);
  ++counts_[1];
  ++slots_[0];
  CommitDigestCpu(params_, other);
  EXPECT_NE(first[0], other[0]);
  --slots_[0];
  path_[0] = 5;
  CommitDigestCpu(params_, other);
  EXPECT_NE(first[0], other[0]);
}

TEST_F(Commit, UndoesAllLayersWhicheverWriteFails) {
  for (int fail_at = 0; fail_at < kLayers * 5; ++fail_at) {
    FailingWriter writer(fail_at, /*forever=*/false);
    const CommitVerdict verdict = CommitCpu(params_, log_, writer);
    EXPECT_EQ(verdict.error, CommitError::kWriteFailed);
    EXPECT_EQ(status_[kStatusCommitted], 0);
    ExpectUnchanged();
  }
}

TEST_F(Commit, SucceedsAfterAFailureBecauseStagingIsIntact) {
  FailingWriter writer(7, /*forever=*/false);
  EXPECT_EQ(CommitCpu(params_, log_, writer).error, CommitError::kWriteFailed);
  EXPECT_EQ(Run().error, CommitError::kOk);
  ExpectCommitted({{0, 5}, {1, 6}, {2, 7}, {3, 20}, {4, 21}});
}

TEST_F(Commit, CountsOnlyWhatItWroteAndSettlesTheRestOnClosing) {
  std::vector<int64_t> counters(kNumCommitCounters, 0);
  params_.counters = counters.data();
  params_.bytes_per_token = 100;
  Run();  // five tokens, the round goes on
  EXPECT_EQ(counters[kCounterRejectedTokens], 0);
  Accept({{0, 1}}, {2}, {{5, 5}});
  Run();  // refused, and then corrected
  Accept({{0, 1}}, {2}, {{5, 6}});
  params_.closing_tokens = 10;
  Run();  // two more of ten
  EXPECT_EQ(counters[kCounterOutcomes], 2);
  EXPECT_EQ(counters[kCounterOutcomes + static_cast<int>(CommitError::kDuplicateSlot)], 1);
  EXPECT_EQ(counters[kCounterCommittedTokens], 7);
  EXPECT_EQ(counters[kCounterCommittedBytes], 700);
  EXPECT_EQ(counters[kCounterRejectedTokens], 3);
  EXPECT_EQ(counters[kCounterRejectedBytes], 300);
  EXPECT_EQ(counters[kCounterFailedTokens], 0);
  EXPECT_EQ(counters[kCounterOpenTokens], 0);
}

TEST_F(Commit, CountsTheRestAsFailedWhenTheLastCommitIsRefused) {
  std::vector<int64_t> counters(kNumCommitCounters, 0);
  params_.counters = counters.data();
  params_.bytes_per_token = 100;
  Accept({{0, 1}}, {2}, {{5, 6}});
  Run();
  Accept({{0, 1}}, {2}, {{9, 9}});
  params_.closing_tokens = 10;
  Run();
  EXPECT_EQ(counters[kCounterOutcomes], 1);
  EXPECT_EQ(counters[kCounterOutcomes + static_cast<int>(CommitError::kDuplicateSlot)], 1);
  EXPECT_EQ(counters[kCounterCommittedTokens], 2);
  EXPECT_EQ(counters[kCounterRejectedTokens], 0);
  EXPECT_EQ(counters[kCounterRejectedBytes], 0);
  EXPECT_EQ(counters[kCounterFailedTokens], 8);
  EXPECT_EQ(counters[kCounterOpenTokens], 0);
}

}  // namespace
}  // namespace nwor
