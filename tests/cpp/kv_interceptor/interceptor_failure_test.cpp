#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/check.h"
#include "kv_interceptor/interceptor.h"
#include "kv_interceptor/interceptor_fixture.h"
#include "message_of.h"

namespace nwor {
namespace {

class FailOnce final : public CacheWriter {
 public:
  explicit FailOnce(int failures) : failures_(failures) {}
  void WriteRow(const CacheLayout& cache, int64_t slot, const KvRowsView& row,
                DType row_dtype) override {
    if (failures_ > 0) {
      --failures_;
      throw std::runtime_error("injected");
    }
    PlainCacheWriter().WriteRow(cache, slot, row, row_dtype);
  }

 private:
  int failures_;
};

using InterceptorFailureTest = InterceptorTest;

TEST_F(InterceptorFailureTest, CountsABypassOfTheHost) {
  Interceptor interceptor{NworConfig{}};
  int logged = 0;
  interceptor.SetLogSink([&](BypassReason, std::string_view) { ++logged; });
  for (int i = 0; i < 2; ++i) interceptor.ReportBypass(BypassReason::kCommitFailure, "by hand");
  const auto index = static_cast<size_t>(BypassReason::kCommitFailure);
  EXPECT_EQ(interceptor.stats().fallbacks[index], 2);
  EXPECT_EQ(logged, 1);
  EXPECT_THROW(interceptor.ReportBypass(BypassReason::kNone, ""), Error);
  NworConfig strict;
  strict.strict = true;
  EXPECT_THROW(Interceptor{strict}.ReportBypass(BypassReason::kCommitFailure, ""), Error);
}

TEST_F(InterceptorFailureTest, SaysIncompleteAndWritesNothingWhenALayerIsMissing) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor);
  interceptor.Begin({{2}, {1}, {}});
  interceptor.Write(Layer(0), Rows(2), Rows(2), Slots({-1, 5}));
  interceptor.Write(Layer(2), Rows(2), Rows(2), Slots({-1, 5}));
  const Receipt receipt = interceptor.Commit(Ints({1}).view({1, 1}), Ints({1}));
  EXPECT_FALSE(receipt.ok());
  EXPECT_EQ(receipt.degraded, BypassReason::kIncompleteStaging);
  EXPECT_NE(receipt.problem.find("layer.1"), std::string::npos) << receipt.problem;
  EXPECT_TRUE(Unchanged());
  EXPECT_EQ(interceptor.stats().rejected_tokens, 0);
  EXPECT_EQ(interceptor.stats().failed_tokens, 1);
  EXPECT_EQ(interceptor.stats().cache_bytes_avoided, 0);
  EXPECT_EQ(Failures(interceptor, CommitError::kIncompleteStaging), 1);
}

TEST_F(InterceptorFailureTest, RefusesALateWriteOfAnOldRound) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 1);
  const int64_t old_epoch = interceptor.Begin({{2}, {1}, {}}).epoch;
  interceptor.Abort();
  const auto late = [&] {
    return interceptor.Write(Layer(0), Rows(2), Rows(2), Slots({4, 5}), std::nullopt, old_epoch);
  };
  EXPECT_EQ(late().reason, BypassReason::kStaleRound);
  interceptor.Begin({{2}, {1}, {}});
  EXPECT_EQ(late().reason, BypassReason::kStaleRound);
  EXPECT_TRUE(Unchanged());
  EXPECT_EQ(interceptor.stats().fallbacks[static_cast<int>(BypassReason::kStaleRound)], 2);
}

TEST_F(InterceptorFailureTest, StrictTurnsEveryBypassButDisabledIntoAnError) {
  NworConfig config;
  config.strict = true;
  Interceptor interceptor{config};
  Bind(interceptor, 2);
  interceptor.Begin({{2}, {1}, {}});
  interceptor.Write(Layer(0), Rows(2), Rows(2), Slots({4, 5}));
  EXPECT_THROW(interceptor.Write(Layer(1), Rows(2), Rows(2), Slots({4, 6})), Error);
  EXPECT_THROW(interceptor.Write("nobody", Rows(2), Rows(2), Slots({4, 5})), Error);
  EXPECT_THROW(interceptor.Commit(Ints({1}).view({1, 1}), Ints({1})), Error);
  interceptor.Abort();
  interceptor.SetEnabled(false);
  EXPECT_EQ(interceptor.Begin({{2}, {1}, {}}).reason, BypassReason::kDisabled);
  EXPECT_EQ(interceptor.Write(Layer(0), Rows(2), Rows(2), Slots({4, 5})).reason,
            BypassReason::kDisabled);
}

TEST_F(InterceptorFailureTest, LogsEachReasonOnce) {
  Interceptor interceptor{NworConfig{}};
  std::map<BypassReason, int> logged;
  interceptor.SetLogSink([&](BypassReason reason, std::string_view) { ++logged[reason]; });
  for (int i = 0; i < 3; ++i) {
    interceptor.Write("nobody", Rows(1), Rows(1), Slots({0}));
  }
  EXPECT_EQ(logged.size(), 1U);
  EXPECT_EQ(logged[BypassReason::kUnboundLayer], 1);
}

TEST_F(InterceptorFailureTest, WritesAcceptedRowsFromStagingWhenTheCommitFailsOnce) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor);
  FailOnce writer(1);
  interceptor.SetCacheWriter(&writer);
  interceptor.Begin({{3}, {2}, {}});
  std::vector<at::Tensor> written;
  for (int layer = 0; layer < kLayers; ++layer) {
    written.push_back(Rows(3));
    interceptor.Write(Layer(layer), written[layer], Rows(3), Slots({-1, 5, 6}));
  }
  const Receipt receipt = interceptor.Commit(Ints({1, 2}).view({1, 2}), Ints({2}));
  EXPECT_TRUE(receipt.ok());
  EXPECT_EQ(receipt.degraded, BypassReason::kCommitFailure);
  EXPECT_TRUE(at::equal(KeySlot(2, 6), written[2][2]));
  EXPECT_EQ(interceptor.stats().committed_tokens, 2);
}

TEST_F(InterceptorFailureTest, CountsWhatIsCommittedAlsoWhenStrictReportsTheFailure) {
  NworConfig config;
  config.strict = true;
  Interceptor interceptor{config};
  Bind(interceptor, 1);
  FailOnce writer(1);
  interceptor.SetCacheWriter(&writer);
  interceptor.Begin({{3}, {2}, {}});
  const at::Tensor key = Rows(3);
  interceptor.Write(Layer(0), key, Rows(3), Slots({-1, 5, 6}));
  EXPECT_THROW(interceptor.Commit(Ints({1}).view({1, 1}), Ints({1})), Error);
  EXPECT_TRUE(at::equal(KeySlot(0, 5), key[1]));
  interceptor.Abort();
  EXPECT_EQ(interceptor.stats().committed_tokens, 1);
  EXPECT_EQ(interceptor.stats().rejected_tokens, 1);
}

TEST_F(InterceptorFailureTest, SaysLostAndChangesNothingWhenTheCommitFailsAgain) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor);
  FailOnce writer(1000);
  interceptor.SetCacheWriter(&writer);
  interceptor.Begin({{3}, {2}, {}});
  for (int layer = 0; layer < kLayers; ++layer) {
    interceptor.Write(Layer(layer), Rows(3), Rows(3), Slots({-1, 5, 6}));
  }
  const Receipt receipt = interceptor.Commit(Ints({1, 2}).view({1, 2}), Ints({2}));
  EXPECT_FALSE(receipt.ok());
  EXPECT_EQ(receipt.degraded, BypassReason::kCommitLost);
  EXPECT_TRUE(Unchanged());
  EXPECT_EQ(interceptor.stats().committed_tokens, 0);
  EXPECT_EQ(interceptor.stats().rejected_tokens, 0);
  EXPECT_EQ(interceptor.stats().failed_tokens, 2);
  EXPECT_EQ(Failures(interceptor, CommitError::kWriteFailed), 1);
}

TEST_F(InterceptorFailureTest, ARefusedChunkLeavesItsDestinationsFree) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 1);
  FailOnce writer(2);
  interceptor.SetCacheWriter(&writer);
  interceptor.Begin({{2}, {1}, {}});
  const at::Tensor key = Rows(2);
  interceptor.Write(Layer(0), key, Rows(2), Slots({-1, 5}));
  const auto commit = [&](bool last) {
    return interceptor.Commit(Ints({1}).view({1, 1}), Ints({1}), {}, RowSpace::kBatch, last);
  };
  EXPECT_FALSE(commit(/*last=*/false).ok());
  EXPECT_TRUE(commit(/*last=*/true).ok());
  EXPECT_TRUE(at::equal(KeySlot(0, 5), key[1]));
}

TEST_F(InterceptorFailureTest, AGroupWhoseLayersHaveLostTheirMemoryTakesNoPart) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 1);
  const at::Tensor other = at::zeros({kPages, kPageSize, kHeads, kDim});
  interceptor.BindLayer("other", other, other.clone(), 1);
  interceptor.Begin({{3}, {2}, {}});
  interceptor.Abort();
  EXPECT_EQ(interceptor.stats().num_groups, 2);

  interceptor.BindLayer("other", at::empty({0}), at::empty({0}), 1);
  EXPECT_EQ(interceptor.stats().num_groups, 1);
  for (const bool given : {false, true}) {
    interceptor.Begin({{3}, {2}, {}});
    const at::Tensor key = Rows(3);
    interceptor.Write(Layer(0), key, Rows(3), Slots({4, 5, 6}));
    EXPECT_EQ(interceptor.Write("other", key, key, Slots({4, 5, 6})).action, Action::kBypass);
    std::vector<at::Tensor> slots;
    if (given) slots = {Slots({5, 6}).view({1, 2})};
    EXPECT_TRUE(interceptor.Commit(Ints({1, 2}).view({1, 2}), Ints({2}), slots).ok());
    EXPECT_TRUE(at::equal(KeySlot(0, 6), key[2]));
  }
}

TEST_F(InterceptorFailureTest, WaitsForMemoryAndTakesItWhenBoundAgain) {
  Interceptor interceptor{NworConfig{}};
  interceptor.BindLayer(Layer(0), at::empty({0}), at::empty({0}));
  EXPECT_EQ(interceptor.Begin({{2}, {1}, {}}).reason, BypassReason::kNotReady);
  EXPECT_EQ(interceptor.Write(Layer(0), Rows(2), Rows(2), Slots({4, 5})).reason,
            BypassReason::kNotReady);
  interceptor.Abort();
  Bind(interceptor, 1);
  EXPECT_TRUE(interceptor.Begin({{2}, {1}, {}}).stage);
}

TEST_F(InterceptorFailureTest, BypassesCachesItCannotWriteAndSaysSo) {
  Interceptor interceptor{NworConfig{}};
  const at::Tensor cache = at::zeros({kPages, kPageSize, kHeads, kDim}, at::kChar);
  interceptor.BindLayer(Layer(0), cache, cache.clone());
  interceptor.Begin({{2}, {1}, {}});
  EXPECT_EQ(interceptor.Write(Layer(0), Rows(2), Rows(2), Slots({4, 5})).reason,
            BypassReason::kUnsupportedLayout);
}

TEST_F(InterceptorFailureTest, CommitsTheOtherLayersWhenOneCannotBeStaged) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 2);
  const at::Tensor foreign = at::zeros({kPages, kPageSize, kHeads, kDim}, at::kChar);
  interceptor.BindLayer("foreign", foreign, foreign);
  ASSERT_TRUE(interceptor.Begin({{2}, {1}, {}}).stage);
  const at::Tensor key = Rows(2);
  for (int layer = 0; layer < 2; ++layer) {
    interceptor.Write(Layer(layer), key, Rows(2), Slots({4, 5}));
  }
  EXPECT_EQ(interceptor.Write("foreign", Rows(2), Rows(2), Slots({4, 5})).action, Action::kBypass);
  EXPECT_TRUE(interceptor.Commit(Ints({1}).view({1, 1}), Ints({1})).ok());
  for (int layer = 0; layer < 2; ++layer) EXPECT_TRUE(at::equal(KeySlot(layer, 5), key[1]));
  EXPECT_TRUE(at::equal(foreign, at::zeros_like(foreign)));
}

TEST_F(InterceptorFailureTest, ReportsOnceThatItWasSwitchedOff) {
  Interceptor interceptor{NworConfig{}};
  const auto reported = [&] {
    return interceptor.stats().fallbacks[static_cast<int>(BypassReason::kDisabled)];
  };
  interceptor.SetEnabled(true);
  EXPECT_EQ(reported(), 0);
  interceptor.SetEnabled(false);
  EXPECT_EQ(reported(), 1);
  interceptor.SetEnabled(false);
  EXPECT_EQ(reported(), 1);
}

TEST_F(InterceptorFailureTest, WrongUseThrowsAndLeavesTheRoundAsItWas) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 1);
  EXPECT_THROW(interceptor.Commit(Ints({1}).view({1, 1}), Ints({1})), Error);
  EXPECT_THROW(interceptor.Abort(), Error);
  EXPECT_THROW(interceptor.Write(Layer(0), Rows(1), Rows(1), Slots({0})), Error);
  EXPECT_THROW(interceptor.Begin({{2}, {2}, {}}), Error);        // no root
  EXPECT_THROW(interceptor.Begin({{3}, {2}, {{1, 0}}}), Error);  // a row is its own parent
  EXPECT_THROW(interceptor.Begin({{3, 1}, {2}, {}}), Error);     // sizes
  interceptor.Begin({{3}, {2}, {}});
  EXPECT_THROW(interceptor.Begin({{3}, {2}, {}}), Error);
  EXPECT_THROW(interceptor.BindLayer("late", keys_[0], values_[0]), Error);
  EXPECT_THROW(interceptor.SetEnabled(false), Error);
  EXPECT_THROW(interceptor.Write(Layer(0), Rows(2), Rows(2), Slots({1, 2})), Error);
  EXPECT_THROW(interceptor.Write(Layer(0), Rows(3).to(at::kHalf), Rows(3), Slots({1, 2, 3})),
               Error);
  EXPECT_THROW(interceptor.Write(Layer(0), Rows(3), Rows(3), Slots({1, 2, 32})), Error);
  EXPECT_THROW(interceptor.Write(Layer(0), Rows(3), Rows(3), Ints({1, 2, 3})), Error);
  EXPECT_TRUE(Unchanged());
  EXPECT_EQ(interceptor.Write(Layer(0), Rows(3), Rows(3), Slots({-1, 2, 3})).staged_rows, 2);
  EXPECT_THROW(interceptor.Commit(Ints({1}).view({1, 1}), Ints({2})), Error);
  EXPECT_THROW(interceptor.Commit(Ints({2}).view({1, 1}), Ints({1})), Error);  // skips row 1
  EXPECT_THROW(interceptor.Commit(Ints({0}).view({1, 1}), Ints({1})), Error);  // the root
  EXPECT_TRUE(Unchanged());
  EXPECT_TRUE(interceptor.Commit(Ints({1}).view({1, 1}), Ints({1})).ok());
  const InterceptorStats stats = interceptor.stats();
  EXPECT_EQ(Failures(interceptor, CommitError::kCountRange), 1);
  EXPECT_EQ(Failures(interceptor, CommitError::kNotAChain), 1);
  EXPECT_EQ(Failures(interceptor, CommitError::kPathRange), 1);
  EXPECT_EQ(stats.failed_tokens, 0) << "the call was corrected";
  EXPECT_EQ(stats.rejected_tokens, 1);
}

}  // namespace
}  // namespace nwor
