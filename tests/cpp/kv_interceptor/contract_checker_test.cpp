#include "kv_interceptor/checker_fixture.h"
#include "metrics/counters.h"

// Every rule the checker knows, broken on purpose: the checker must name it, the layer and the
// slot.

namespace nwor {
namespace {

TEST_F(ContractCheckerTest, C1CatchesAPageThatNobodyNeeds) {
  BeginAndWrite();
  const Receipt receipt = Accept(1);
  checker_.TellRequest(0, 8, 3, kPageSize);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "C1");
}

TEST_F(ContractCheckerTest, C1CatchesALengthThatWasNotRewound) {
  checker_.TellRequest(0, 5, 2, kPageSize);
  BeginAndWrite();
  const Receipt receipt = Accept(1);
  checker_.TellRequest(0, 5 + 1 + 3, 3, kPageSize);  // as if all three had been accepted
  EXPECT_CAUGHT(checker_.Verify(&receipt), "C1");
}

TEST_F(ContractCheckerTest, C2CatchesOneBitInAFarPage) {
  BeginAndWrite();
  const Receipt receipt = Accept(2);
  FlipByte(1, 23);
  const auto found = checker_.Verify(&receipt);
  EXPECT_EQ(found.size(), 1U) << Text(found);
  EXPECT_CAUGHT(found, "C2", Name(1), 23);
}

TEST_F(ContractCheckerTest, C3CatchesADraftInTheCacheBeforeTheCommit) {
  BeginAndWrite();
  Slot(keys_, 1, 7).copy_(written_keys_[1][2]);
  const StagingBuffer& staging = *interceptor_.staging(0);
  Slot(values_, 1, 7).copy_(staging.values()[1][1]);  // row 2 is the second draft
  EXPECT_CAUGHT(checker_.VerifyStaged(), "C3", Name(1), 7);
}

TEST_F(ContractCheckerTest, C3CatchesStagingThatLostARow) {
  BeginAndWrite();
  interceptor_.staging(0)->keys()[2][1].zero_();
  EXPECT_CAUGHT(checker_.VerifyStaged(), "C3", Name(2));
}

TEST_F(ContractCheckerTest, C3CatchesADraftWrittenDirectlyInAStagedRound) {
  Tamper tamper(checker_);
  tamper.on_write = [](Outcome& outcome) { outcome = {Action::kDirect, BypassReason::kNone, 0}; };
  interceptor_.SetObserver(&tamper);
  BeginAndWrite();
  EXPECT_CAUGHT(checker_.VerifyStaged(), "C3", Name(0), 6);
}

TEST_F(ContractCheckerTest, C4CatchesALeakedSlot) {
  checker_.TellFreeSlots(10);
  BeginAndWrite();
  const Receipt receipt = Accept(0);
  checker_.TellFreeSlots(9);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "C4");
}

TEST_F(ContractCheckerTest, C4CatchesAPageThatARequestGaveBackToNobody) {
  checker_.TellFreeSlots(8);
  checker_.TellRequest(0, 8, 3, kPageSize);
  BeginAndWrite();
  const Receipt receipt = Accept(0);
  checker_.TellRequest(0, 9, 3, kPageSize);
  checker_.TellFreeSlots(4);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "C4");
}

TEST_F(ContractCheckerTest, C5CatchesADraftWrittenInAnAbortedRound) {
  BeginAndWrite();
  interceptor_.Abort();
  Slot(keys_, 0, 6).copy_(written_keys_[0][1]);
  EXPECT_CAUGHT(checker_.Verify(nullptr), "C5", Name(0), 6);
}

TEST_F(ContractCheckerTest, C5CatchesAReceiptOfNoCommit) {
  BeginAndWrite();
  Receipt forged = Accept(1);
  forged.epoch += 1;
  EXPECT_CAUGHT(checker_.Verify(&forged), "C5");
}

TEST_F(ContractCheckerTest, C6CatchesADraftThatWasNotEmitted) {
  BeginAndWrite();
  const Receipt receipt = Accept(3);
  EXPECT_CAUGHT(checker_.Verify(&receipt, {2, 0}), "C6");
}

TEST_F(ContractCheckerTest, C6CatchesACommittedRowThatIsNotOnAPath) {
  Tamper tamper(checker_);
  const at::Tensor path = at::tensor({2, -1, -1, -1, -1, -1}, at::kInt).view({2, 3});
  tamper.path = &path;  // skips row 1
  interceptor_.SetObserver(&tamper);
  BeginAndWrite();
  const Receipt receipt = Accept(1);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "C6");
}

TEST_F(ContractCheckerTest, C6CatchesAPathThatDescends) {
  Tamper tamper(checker_);
  const at::Tensor path = at::tensor({2, 1, -1, -1, -1, -1}, at::kInt).view({2, 3});
  tamper.path = &path;
  interceptor_.SetObserver(&tamper);
  BeginAndWrite(/*ascending=*/true);
  const Receipt receipt = Accept(2);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "C6");
}

TEST_F(ContractCheckerTest, C7CatchesAWriteOfOursWhenSwitchedOff) {
  Tamper tamper(checker_);
  tamper.on_write = [&](Outcome&) { FlipByte(0, 13); };
  interceptor_.SetObserver(&tamper);
  interceptor_.SetEnabled(false);
  checker_.Snapshot();
  interceptor_.Begin(kPlan);
  WriteAll();
  interceptor_.Abort();
  EXPECT_CAUGHT(checker_.Verify(nullptr), "C7", Name(0), 13);
}

TEST_F(ContractCheckerTest, C7CatchesAnAnswerThatTakesTheWriteWhenSwitchedOff) {
  Tamper tamper(checker_);
  tamper.on_write = [](Outcome& outcome) { outcome.action = Action::kDirect; };
  tamper.on_begin = [](Decision& decision) { decision.stage = true; };
  interceptor_.SetObserver(&tamper);
  interceptor_.SetEnabled(false);
  checker_.Snapshot();
  interceptor_.Begin(kPlan);
  WriteAll();
  interceptor_.Abort();
  const auto found = checker_.Verify(nullptr);
  EXPECT_CAUGHT(found, "C7", Name(0));
  EXPECT_CAUGHT(found, "C7", "", -1);
}

TEST_F(ContractCheckerTest, C7CatchesCountersThatMoveWhenSwitchedOff) {
  interceptor_.SetEnabled(false);
  checker_.Snapshot();
  interceptor_.SetEnabled(true);
  interceptor_.SetObserver(nullptr);  // a round the checker is not shown
  BeginAndWrite();
  interceptor_.Abort();
  interceptor_.SetEnabled(false);
  EXPECT_CAUGHT(checker_.Verify(nullptr), "C7");
}

TEST_F(ContractCheckerTest, C8CatchesAWriteThatTouchesADraftsSlot) {
  Tamper tamper(checker_);
  tamper.on_write = [&](Outcome&) { FlipByte(0, 7); };
  interceptor_.SetObserver(&tamper);
  ASSERT_TRUE(interceptor_.Begin(kPlan).stage);
  interceptor_.Write(Name(0), Rows(7), Rows(7), Slots(kSlots));
  tamper.on_write = nullptr;
  const auto found = checker_.VerifyStaged();
  EXPECT_CAUGHT(found, "C8", Name(0), 7);
}

TEST_F(ContractCheckerTest, C8CatchesJunkInADraftsSlotBeforeTheCommit) {
  BeginAndWrite();
  FlipByte(2, 8);
  EXPECT_CAUGHT(checker_.VerifyStaged(), "C8", Name(2), 8);
}

TEST_F(ContractCheckerTest, C9CatchesOneWrongBitInAnAcceptedRow) {
  BeginAndWrite();
  const Receipt receipt = Accept(2);
  FlipByte(2, 7);
  const auto found = checker_.Verify(&receipt);
  EXPECT_EQ(found.size(), 1U) << Text(found);
  EXPECT_CAUGHT(found, "C9", Name(2), 7);
}

TEST_F(ContractCheckerTest, C9CatchesKeysAndValuesExchanged) {
  FaultyWriter writer;
  writer.change = [](CacheLayout&, int64_t&, KvRowsView& row) { std::swap(row.key, row.value); };
  interceptor_.SetCacheWriter(&writer);
  BeginAndWrite();
  const Receipt receipt = Accept(1);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "C9", Name(0), 6);
}

TEST_F(ContractCheckerTest, C9CatchesAnAcceptedRowThatIsNowhere) {
  Tamper tamper(checker_);
  FaultyWriter writer;
  writer.change = [&](CacheLayout&, int64_t& slot, KvRowsView&) { slot = 23; };
  interceptor_.SetCacheWriter(&writer);
  BeginAndWrite();
  const Receipt receipt = Accept(1);
  const auto found = checker_.Verify(&receipt);
  EXPECT_CAUGHT(found, "C9", Name(1), 6);
  EXPECT_CAUGHT(found, "C2", Name(1), 23);  // and where it went
}

TEST_F(ContractCheckerTest, C9CatchesAWrongScaleInAFloat8Cache) {
  const at::Tensor key = at::zeros({kPages, kPageSize, kHeads, kDim}, at::kFloat8_e4m3fn);
  const at::Tensor value = key.clone(), scale = at::full({1}, 0.5, at::kFloat);
  Interceptor interceptor{NworConfig{}};
  interceptor.BindLayer("fp8", key, value, 0, scale, scale, at::kFloat);
  ContractChecker checker(interceptor);
  checker.Snapshot();
  FaultyWriter writer;
  writer.change = [](CacheLayout& cache, int64_t&, KvRowsView&) { cache.scales = {}; };
  interceptor.SetCacheWriter(&writer);
  interceptor.Begin({{2}, {1}, {}});
  interceptor.Write("fp8", Rows(2), Rows(2), Slots({1, 2}));
  const Receipt receipt = interceptor.Commit(at::ones({1, 1}, at::kInt), at::ones({1}, at::kInt));
  EXPECT_CAUGHT(checker.Verify(&receipt), "C9", "fp8", 2);
}

TEST_F(ContractCheckerTest, C10CatchesAFallbackThatIsNotCounted) {
  Tamper tamper(checker_);
  tamper.on_write = [](Outcome& outcome) {
    outcome = {Action::kBypass, BypassReason::kSlotMismatch, 0};
  };
  interceptor_.SetObserver(&tamper);
  ASSERT_TRUE(interceptor_.Begin(kPlan).stage);
  interceptor_.Write(Name(0), Rows(1), Rows(1), Slots({6}), std::vector<int32_t>{1});
  interceptor_.Abort();
  EXPECT_CAUGHT(checker_.Verify(nullptr), "C10");
}

TEST_F(ContractCheckerTest, C10CatchesAFallbackThatWroteAllTheSame) {
  Tamper tamper(checker_);
  interceptor_.SetObserver(&tamper);
  ASSERT_TRUE(interceptor_.Begin(kPlan).stage);
  interceptor_.Write(Name(0), Rows(7), Rows(7), Slots(kSlots));
  tamper.on_write = [&](Outcome&) { FlipByte(1, 20); };
  std::vector<int64_t> other = kSlots;
  other[2] = 20;
  interceptor_.Write(Name(1), Rows(7), Rows(7), Slots(other));
  interceptor_.Abort();
  EXPECT_CAUGHT(checker_.Verify(nullptr), "C10", Name(1), 20);
}

TEST_F(ContractCheckerTest, C11CatchesALayerThatWasLeftOut) {
  FaultyWriter writer;
  writer.dropped_layer = keys_[1].const_data_ptr();
  interceptor_.SetCacheWriter(&writer);
  BeginAndWrite();
  const Receipt receipt = Accept(2);
  const auto found = checker_.Verify(&receipt);
  EXPECT_EQ(found.size(), 2U) << Text(found);
  EXPECT_CAUGHT(found, "C11", Name(1), 6);
  EXPECT_CAUGHT(found, "C11", Name(1), 7);
}

TEST_F(ContractCheckerTest, C11CatchesARefusedCommitThatLeftSomethingBehind) {
  FaultyWriter writer;
  writer.fails = true;
  interceptor_.SetCacheWriter(&writer);
  BeginAndWrite();
  const Receipt receipt = Accept(2);
  ASSERT_FALSE(receipt.ok());
  Slot(keys_, 2, 6).copy_(written_keys_[2][1]);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "C11", Name(2), 6);
}

TEST_F(ContractCheckerTest, C11CatchesALayerThatNeverStagedWhatWasCommitted) {
  Tamper tamper(checker_);
  interceptor_.SetObserver(&tamper);
  ASSERT_TRUE(interceptor_.Begin(kPlan).stage);
  interceptor_.Write(Name(0), Rows(7), Rows(7), Slots(kSlots));
  interceptor_.Write(Name(1), Rows(7), Rows(7), Slots(kSlots));
  tamper.on_commit = [](Receipt& receipt) {  // layer 2 is missing: the real answer is a refusal
    receipt.degraded = BypassReason::kNone;
    receipt.status[kStatusCode] = 0;
  };
  const Receipt receipt = Accept(1);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "C11", Name(2), 6);
}

TEST_F(ContractCheckerTest, N1CatchesAStageThatIsNotCounted) {
  BeginAndWrite();
  const at::Tensor key = Rows(1), value = Rows(1), slots = Slots({6});
  const std::optional<std::vector<int32_t>> rows = std::vector<int32_t>{1};
  const std::string name = Name(0);
  const WriteCall call{name, key, value, slots, rows};
  checker_.BeforeWrite(call);
  checker_.AfterWrite(call, {Action::kStage, BypassReason::kNone, 0});
  interceptor_.Abort();
  EXPECT_CAUGHT(checker_.Verify(nullptr), "N1");
}

TEST_F(ContractCheckerTest, N2CatchesLayersThatWereStagedWithOtherSlots) {
  Tamper tamper(checker_);
  interceptor_.SetObserver(&tamper);
  ASSERT_TRUE(interceptor_.Begin(kPlan).stage);
  interceptor_.Write(Name(0), Rows(7), Rows(7), Slots(kSlots));
  std::vector<int64_t> other = kSlots;
  other[3] = 21;
  const at::Tensor seen = Slots(other);
  tamper.slot_mapping = &seen;
  interceptor_.Write(Name(1), Rows(7), Rows(7), Slots(kSlots));
  tamper.slot_mapping = nullptr;
  interceptor_.Write(Name(2), Rows(7), Rows(7), Slots(kSlots));
  EXPECT_CAUGHT(checker_.VerifyStaged(), "N2", Name(1), 21);
  const Receipt receipt = Accept(1);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "N2", "", -1);
}

TEST_F(ContractCheckerTest, N3CatchesARowCountedTwice) {
  Tamper tamper(checker_);
  interceptor_.SetObserver(&tamper);
  BeginAndWrite();
  tamper.on_write = [](Outcome& outcome) { outcome.staged_rows = 1; };
  interceptor_.Write(Name(0), Rows(1), Rows(1), Slots({6}), std::vector<int32_t>{1});
  EXPECT_CAUGHT(checker_.VerifyStaged(), "N3", Name(0));
}

TEST_F(ContractCheckerTest, N3CatchesTokensThatAreNotCounted) {
  interceptor_.SetObserver(nullptr);
  BeginAndWrite();
  interceptor_.Abort();  // three tokens the checker has not seen
  EXPECT_CAUGHT(checker_.Verify(nullptr), "N3");
}

TEST_F(ContractCheckerTest, N4CatchesARootThatDidNotReachTheCache) {
  Tamper tamper(checker_);
  tamper.on_write = [&](Outcome&) { Slot(keys_, 0, 5).zero_(); };
  interceptor_.SetObserver(&tamper);
  ASSERT_TRUE(interceptor_.Begin(kPlan).stage);
  interceptor_.Write(Name(0), Rows(7), Rows(7), Slots(kSlots));
  EXPECT_CAUGHT(checker_.VerifyStaged(), "N4", Name(0), 5);
}

TEST_F(ContractCheckerTest, N4CatchesAPrefillRowLostLater) {
  BeginAndWrite();
  const Receipt receipt = Accept(1);
  FlipByte(1, 14);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "N4", Name(1), 14);
}

TEST_F(ContractCheckerTest, N7CatchesAReceiptThatCountsWrong) {
  Tamper tamper(checker_);
  tamper.on_commit = [](Receipt& receipt) { receipt.status[kStatusCommitted] = 1; };
  interceptor_.SetObserver(&tamper);
  BeginAndWrite();
  const Receipt receipt = Accept(2);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "N7");
}

TEST_F(ContractCheckerTest, N7CatchesADestinationThatTwoChunksShare) {
  Tamper tamper(checker_);
  interceptor_.SetObserver(&tamper);
  BeginAndWrite();
  Accept(1, /*last=*/false);
  const std::vector<at::Tensor> slots = {at::full({2, 3}, 6, at::kLong)};
  tamper.slots = &slots;
  const Receipt receipt = Accept(1, /*last=*/true, /*first=*/2);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "N7", "", 6);
}

TEST_F(ContractCheckerTest, N8CatchesARejectedRowInTheCache) {
  BeginAndWrite();
  const Receipt receipt = Accept(1);
  Slot(keys_, 1, 8).copy_(written_keys_[1][3]);
  EXPECT_CAUGHT(checker_.Verify(&receipt), "N8", Name(1), 8);
}

TEST_F(ContractCheckerTest, N13CatchesAStagedRoundWithoutRoom) {
  NworConfig config;
  config.max_staging_bytes = 64;
  Interceptor small(config);
  small.BindLayer("a", keys_[0], values_[0]);
  ContractChecker checker(small);
  checker.Snapshot();
  Tamper tamper(checker);
  tamper.on_write = [](Outcome& outcome) { outcome = {Action::kStage, BypassReason::kNone, 3}; };
  small.SetObserver(&tamper);
  small.Begin(kPlan);
  small.Write("a", Rows(7), Rows(7), Slots(kSlots));
  EXPECT_CAUGHT(checker.VerifyStaged(), "N13", "a");
}

TEST_F(ContractCheckerTest, N14CatchesAnEmittedDraftThatIsNotCommitted) {
  BeginAndWrite();
  const Receipt receipt = Accept(1);
  EXPECT_CAUGHT(checker_.Verify(&receipt, {2, 0}), "N14");
}

// ---- the checker itself ------------------------------------------------------------------------

TEST_F(ContractCheckerTest, CountsWhatItReports) {
  const int64_t before = Counters::Global().Read()[Counter::kContractViolations];
  BeginAndWrite();
  const Receipt receipt = Accept(1);
  FlipByte(0, 20);
  FlipByte(1, 20);
  EXPECT_EQ(checker_.Verify(&receipt).size(), 2U);
  EXPECT_EQ(Counters::Global().Read()[Counter::kContractViolations], before + 2);
}

TEST_F(ContractCheckerTest, RefusesToVerifyLayersItHasNotSeen) {
  interceptor_.BindLayer("late", at::zeros_like(keys_[0]), at::zeros_like(keys_[0]));
  EXPECT_THROW(checker_.Verify(nullptr), Error);
  interceptor_.BindLayer(Name(0), at::zeros_like(keys_[0]), at::zeros_like(keys_[0]));
  EXPECT_THROW(checker_.VerifyStaged(), Error);
  checker_.Snapshot();
  EXPECT_SILENT(checker_.Verify(nullptr));
}

TEST_F(ContractCheckerTest, RefusesASnapshotInAnOpenRound) {
  BeginAndWrite();
  EXPECT_THROW(checker_.Snapshot(), Error);
}

TEST_F(ContractCheckerTest, FollowsManyRoundsFromOneSnapshot) {
  for (int round = 0; round < 20; ++round) {
    BeginAndWrite();
    const Receipt receipt = Accept(round % 4);
    ASSERT_TRUE(receipt.ok());
  }
  EXPECT_SILENT(checker_.Verify(nullptr));
}

}  // namespace
}  // namespace nwor
