#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/check.h"
#include "kv_interceptor/interceptor.h"
#include "kv_interceptor/interceptor_fixture.h"
#include "kv_interceptor/short_memory.h"
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

// A round of three rows with two drafts, begun while no tensor gets more than `most_bytes`.
Decision BeginShort(Interceptor& interceptor, size_t most_bytes = 0) {
  const ShortMemory memory(std::max(most_bytes, size_t{128}));  // rounds have tables, too
  return interceptor.Begin({{3}, {2}, {}});
}

TEST_F(InterceptorFailureTest, WritesDirectlyWhileThereIsNoMemoryForStaging) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor);
  std::vector<std::string> logged;
  interceptor.SetLogSink(
      [&](BypassReason, std::string_view message) { logged.emplace_back(message); });
  const Decision decision = BeginShort(interceptor);
  EXPECT_FALSE(decision.stage);
  EXPECT_EQ(decision.reason, BypassReason::kOutOfMemory);
  EXPECT_EQ(logged,
            std::vector<std::string>{"there was no memory for staging: got none for 2 draft rows"});
  EXPECT_EQ(interceptor.stats().staging_bytes, 0);
  const at::Tensor key = Rows(3);
  for (int layer = 0; layer < kLayers; ++layer) {
    const Outcome outcome = interceptor.Write(Layer(layer), key, Rows(3), Slots({4, 5, 6}));
    EXPECT_EQ(outcome.action, Action::kDirect);
    for (int row = 0; row < 3; ++row) EXPECT_TRUE(at::equal(KeySlot(layer, 4 + row), key[row]));
  }
  EXPECT_TRUE(interceptor.Commit(Ints({1}).view({1, 1}), Ints({1})).ok());

  EXPECT_TRUE(interceptor.Begin({{2}, {1}, {}}).stage) << "it needs less";
  interceptor.Write(Layer(0), Rows(2), Rows(2), Slots({-1, 7}));
  interceptor.Abort();
  EXPECT_EQ(interceptor.stats().rejected_tokens, 1);
  EXPECT_EQ(logged.size(), 1U);
}

TEST_F(InterceptorFailureTest, AsksForMemoryAgainAfterSomeRounds) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor);
  {
    const ShortMemory memory(128);
    interceptor.Begin({{3}, {2}, {}});
    interceptor.Abort();
    const int tries = memory.num_refused();
    EXPECT_GT(tries, 0);
    interceptor.Begin({{3}, {2}, {}});
    interceptor.Abort();
    EXPECT_EQ(memory.num_refused(), tries);
  }
  int64_t direct = 2;
  while (!interceptor.Begin({{3}, {2}, {}}).stage) {
    interceptor.Abort();
    ASSERT_LT(++direct, 1000);
  }
  const auto index = static_cast<size_t>(BypassReason::kOutOfMemory);
  EXPECT_EQ(interceptor.stats().fallbacks[index], direct);
  const at::Tensor key = Rows(3);
  for (int layer = 0; layer < kLayers; ++layer) {
    interceptor.Write(Layer(layer), key, key, Slots({4, 5, 6}));
  }
  EXPECT_TRUE(interceptor.Commit(Ints({1, 2}).view({1, 2}), Ints({1})).ok());
  EXPECT_TRUE(at::equal(KeySlot(2, 5), key[1]));
  EXPECT_FALSE(at::equal(KeySlot(2, 6), key[2]));
}

TEST_F(InterceptorFailureTest, TakesTheMemoryThatARoundNeedsWhereThereIsNoMore) {
  NworConfig config;
  config.staging_rows = 64;
  Interceptor interceptor{config};
  Bind(interceptor);
  const int64_t row_bytes = int64_t{kLayers} * kHeads * kDim * 4;
  EXPECT_TRUE(BeginShort(interceptor, 2 * row_bytes).stage);
  EXPECT_EQ(interceptor.stats().staging_bytes, 2 * (2 * row_bytes + 8));
  interceptor.Abort();
  // What fits is not given up for more.
  EXPECT_TRUE(BeginShort(interceptor).stage);
  interceptor.Abort();
}

TEST_F(InterceptorFailureTest, StagingThatCannotGrowHasLostNothing) {
  NworConfig config;
  config.staging_rows = 2;
  Interceptor interceptor{config};
  Bind(interceptor, 1);
  const auto accept = [&](const at::Tensor& key, std::vector<int64_t> slots) {
    const int count = static_cast<int>(key.size(0)) - 1;
    interceptor.Write(Layer(0), key, key, Slots(std::move(slots)));
    const at::Tensor path = at::arange(1, count + 1, at::kInt).view({1, count});
    return interceptor.Commit(path, Ints({count})).ok();
  };
  const at::Tensor before = Rows(3), large = Rows(9), after = Rows(3);
  EXPECT_TRUE(interceptor.Begin({{3}, {2}, {}}).stage);
  EXPECT_TRUE(accept(before, {0, 1, 2}));
  {
    const ShortMemory memory(256);
    EXPECT_EQ(interceptor.Begin({{9}, {8}, {}}).reason, BypassReason::kOutOfMemory);
  }
  EXPECT_TRUE(accept(large, {4, 5, 6, 7, 8, 9, 10, 11, 12}));
  EXPECT_TRUE(interceptor.Begin({{3}, {2}, {}}).stage);
  EXPECT_TRUE(accept(after, {20, 21, 22}));
  for (int row = 0; row < 3; ++row) {
    EXPECT_TRUE(at::equal(KeySlot(0, row), before[row]));
    EXPECT_TRUE(at::equal(KeySlot(0, 20 + row), after[row]));
  }
  for (int row = 0; row < 9; ++row) EXPECT_TRUE(at::equal(KeySlot(0, 4 + row), large[row]));
  EXPECT_EQ(interceptor.stats().committed_tokens, 4);
}

TEST_F(InterceptorFailureTest, IsDirectInAllGroupsWhereOneHasNoMemory) {
  NworConfig config;
  config.staging_rows = 0;
  Interceptor interceptor{config};
  Bind(interceptor, 1);
  const at::Tensor other = at::zeros({kPages, kPageSize, 64 * kHeads, kDim});
  interceptor.BindLayer("other", other, other.clone(), 1);
  EXPECT_EQ(BeginShort(interceptor, 1024).reason, BypassReason::kOutOfMemory);
  const at::Tensor key = Rows(3), others = at::randn({3, 64 * kHeads, kDim});
  EXPECT_EQ(interceptor.Write(Layer(0), key, key, Slots({4, 5, 6})).action, Action::kDirect);
  EXPECT_EQ(interceptor.Write("other", others, others, Slots({4, 5, 6})).action, Action::kDirect);
  EXPECT_TRUE(interceptor.Commit(Ints({1}).view({1, 1}), Ints({1})).ok());
  EXPECT_TRUE(at::equal(KeySlot(0, 6), key[2]));
  EXPECT_TRUE(at::equal(other[1][2], others[2]));
}

TEST_F(InterceptorFailureTest, StrictMakesMissingMemoryAnErrorBeforeTheRound) {
  NworConfig config;
  config.strict = true;
  Interceptor interceptor{config};
  Bind(interceptor);
  EXPECT_EQ(MessageOf([&] { BeginShort(interceptor); }),
            "out_of_memory: there was no memory for staging: got none for 2 draft rows");
  EXPECT_FALSE(interceptor.stats().round_open);
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
