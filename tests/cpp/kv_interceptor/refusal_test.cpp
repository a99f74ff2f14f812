#include "kv_interceptor/checker_fixture.h"
#include "kv_interceptor/commit/digest.h"

// Rounds that cannot be committed, and what is counted for them.

namespace nwor {
namespace {

class Refusal : public ContractCheckerTest {
 protected:
  static at::Tensor OtherSlots(int row, int64_t slot) {
    std::vector<int64_t> slots = kSlots;
    slots[row] = slot;
    return Slots(slots);
  }
  std::vector<at::Tensor> CopyOfCaches() const {
    std::vector<at::Tensor> copies;
    for (size_t layer = 0; layer < keys_.size(); ++layer) {
      copies.push_back(keys_[layer].clone());
      copies.push_back(values_[layer].clone());
    }
    return copies;
  }
  void ExpectCaches(const std::vector<at::Tensor>& copies) const {
    for (size_t layer = 0; layer < keys_.size(); ++layer) {
      EXPECT_TRUE(keys_[layer].equal(copies[2 * layer])) << Name(layer);
      EXPECT_TRUE(values_[layer].equal(copies[2 * layer + 1])) << Name(layer);
    }
  }
};

TEST_F(Refusal, CommitsNothingWhenALayerGaveOtherSlots) {
  ASSERT_TRUE(interceptor_.Begin(kPlan).stage);
  interceptor_.Write(Name(0), Rows(7), Rows(7), Slots(kSlots));
  const Outcome outcome = interceptor_.Write(Name(1), Rows(7), Rows(7), OtherSlots(2, 20));
  EXPECT_EQ(outcome.action, Action::kBypass);
  EXPECT_EQ(outcome.reason, BypassReason::kSlotMismatch);
  interceptor_.Write(Name(2), Rows(7), Rows(7), Slots(kSlots));
  const std::vector<at::Tensor> before = CopyOfCaches();
  const Receipt receipt = Accept(3);
  EXPECT_FALSE(receipt.ok());
  EXPECT_EQ(receipt.verdict().error, CommitError::kSlotMismatch);
  EXPECT_EQ(receipt.degraded, BypassReason::kSlotMismatch);
  EXPECT_EQ(receipt.committed_tokens(), 0);
  ExpectCaches(before);
  EXPECT_EQ(interceptor_.stats().rejected_tokens, 0);
  EXPECT_EQ(interceptor_.stats().failed_tokens, 3);
  EXPECT_EQ(interceptor_.stats().commit_failures[static_cast<size_t>(CommitError::kSlotMismatch)],
            1);
}

TEST_F(Refusal, CommitsNothingWhenALayerThatHadStagedGivesOtherSlotsLater) {
  BeginAndWrite();
  interceptor_.Write(Name(1), Rows(1), Rows(1), Slots({20}), std::vector<int32_t>{2});
  const std::vector<at::Tensor> before = CopyOfCaches();
  EXPECT_FALSE(Accept(1).ok());
  ExpectCaches(before);
}

TEST_F(Refusal, IsOverWithTheRound) {
  BeginAndWrite();
  interceptor_.Write(Name(1), Rows(1), Rows(1), Slots({20}), std::vector<int32_t>{2});
  interceptor_.Abort();
  BeginAndWrite();
  EXPECT_TRUE(Accept(3).ok());
}

TEST_F(Refusal, CountsATokenOnceWhicheverLayersHaveStagedIt) {
  ASSERT_TRUE(interceptor_.Begin(kPlan).stage);
  interceptor_.Write(Name(0), Rows(2), Rows(2), Slots({6, 7}), std::vector<int32_t>{1, 2});
  interceptor_.Write(Name(1), Rows(1), Rows(1), Slots({8}), std::vector<int32_t>{3});
  interceptor_.Abort();
  EXPECT_EQ(interceptor_.stats().staged_tokens, 3);
  EXPECT_EQ(interceptor_.stats().rejected_tokens, 3);
}

TEST_F(Refusal, CountsATokenOnceOverCacheGroups) {
  interceptor_.BindLayer("other", at::zeros_like(keys_[0]), at::zeros_like(keys_[0]), 1);
  ASSERT_TRUE(interceptor_.Begin(kPlan).stage);
  interceptor_.Write(Name(0), Rows(2), Rows(2), Slots({6, 7}), std::vector<int32_t>{1, 2});
  interceptor_.Write("other", Rows(2), Rows(2), Slots({1, 2}), std::vector<int32_t>{2, 3});
  interceptor_.Abort();
  EXPECT_EQ(interceptor_.stats().staged_tokens, 3);
}

TEST(RefusalDigest, OfARoundWithFaultsAgreesWithNoRank) {
  std::array<int64_t, kNumStatusWords> fault{};
  fault[kStatusCode] = static_cast<int64_t>(CommitError::kSlotMismatch);
  CommitParams params;
  params.round_status = fault.data();
  int64_t refused[2];
  CommitDigestCpu(params, refused);
  fault[kStatusCode] = 0;
  int64_t other[2];
  CommitDigestCpu(params, other);
  EXPECT_EQ(other[0], ~other[1]);
  for (const int64_t* rank : {refused, other}) {  // the all-reduce with each
    EXPECT_NE(std::max(refused[0], rank[0]), ~std::max(refused[1], rank[1]));
  }
}

}  // namespace
}  // namespace nwor
