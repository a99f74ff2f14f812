#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "base/check.h"
#include "kv_interceptor/interceptor.h"
#include "kv_interceptor/kv_ops.h"
#include "kv_interceptor/round.h"
#include "kv_interceptor/short_memory.h"
#include "message_of.h"

// Rounds whose writes a CUDA graph repeats: fixed addresses, padding, replays. What the graph does
// on a GPU is done here by hand, with the op that has the same kernel.

namespace nwor {
namespace {

constexpr int kLayers = 2, kPages = 8, kPageSize = 4, kHeads = 2, kDim = 8;

class GraphRowsTest : public ::testing::Test {
 protected:
  static NworConfig Config() {
    NworConfig config;
    config.graph_rows = 12;
    config.staging_rows = 8;
    return config;
  }

  void SetUp() override {
    for (int layer = 0; layer < kLayers; ++layer) {
      keys_.push_back(at::zeros({kPages, kPageSize, kHeads, kDim}));
      values_.push_back(at::zeros({kPages, kPageSize, kHeads, kDim}));
      interceptor_.BindLayer(Name(layer), keys_[layer], values_[layer]);
    }
  }

  static std::string Name(int layer) { return Concat("layer.", layer); }
  static at::Tensor Rows(int64_t rows) { return at::randn({rows, kHeads, kDim}); }
  static at::Tensor Ints(std::vector<int> values) { return at::tensor(values, at::kInt); }
  at::Tensor KeySlot(int layer, int64_t slot) {
    return keys_[layer].reshape({-1, kHeads, kDim})[slot];
  }

  // What a replayed graph would do: every layer's rows by the table of the open round.
  void Replay(const at::Tensor& key, const at::Tensor& slots) {
    const std::vector<int32_t> stage_rows = interceptor_.round().stage_rows;
    const at::Tensor table = at::tensor(stage_rows, at::kInt);
    const StagingBuffer& staging = *interceptor_.staging(0);
    for (int layer = 0; layer < kLayers; ++layer) {
      WriteKv(key, key, keys_[layer], values_[layer], slots, table, staging.keys()[layer],
              staging.values()[layer], std::nullopt, std::nullopt, /*exclusive=*/true,
              std::nullopt);
    }
    for (size_t row = 0; row < stage_rows.size(); ++row) {
      if (stage_rows[row] >= 0) staging.slots()[stage_rows[row]].fill_(slots[row].item<int64_t>());
    }
  }

  std::vector<at::Tensor> keys_, values_;
  Interceptor interceptor_{Config()};
};

TEST_F(GraphRowsTest, StagingKeepsItsAddressAndDoesNotGrow) {
  EXPECT_TRUE(interceptor_.Begin({{3}, {2}, {}}).stage);
  const void* place = interceptor_.staging(0)->keys().const_data_ptr();
  EXPECT_EQ(interceptor_.staging(0)->capacity_rows(), 8);
  interceptor_.Abort();
  EXPECT_TRUE(interceptor_.Begin({{5, 5}, {4, 4}, {}}).stage);
  EXPECT_EQ(interceptor_.staging(0)->keys().const_data_ptr(), place);
  interceptor_.Abort();
  const Decision decision = interceptor_.Begin({{5, 6}, {4, 5}, {}});
  EXPECT_FALSE(decision.stage);
  EXPECT_EQ(decision.reason, BypassReason::kCapacity);
  interceptor_.Abort();
}

TEST_F(GraphRowsTest, IgnoresPaddingBeyondThePlan) {
  interceptor_.Begin({{3}, {2}, {}});
  const at::Tensor key = Rows(7), slots = at::tensor({4, 5, 6, -1, -1, -1, -1}, at::kLong);
  for (int layer = 0; layer < kLayers; ++layer) {
    const Outcome outcome = interceptor_.Write(Name(layer), key, key, slots);
    EXPECT_EQ(outcome.action, Action::kStage);
    EXPECT_EQ(outcome.staged_rows, 2);
  }
  EXPECT_TRUE(interceptor_.Commit(Ints({1, -1}).view({1, 2}), Ints({1})).ok());
  EXPECT_TRUE(at::equal(KeySlot(1, 4), key[0]));
  EXPECT_TRUE(at::equal(KeySlot(1, 5), key[1]));
  EXPECT_TRUE(at::equal(KeySlot(1, 6), at::zeros({kHeads, kDim})));
}

TEST_F(GraphRowsTest, RefusesFewerRowsThanThePlan) {
  interceptor_.Begin({{3}, {2}, {}});
  EXPECT_THROW(interceptor_.Write(Name(0), Rows(2), Rows(2), at::tensor({4, 5}, at::kLong)), Error);
  interceptor_.Abort();
}

TEST_F(GraphRowsTest, CommitsWhatAReplayStaged) {
  interceptor_.Begin({{3, 2}, {2, 1}, {}});
  const at::Tensor key = Rows(5), slots = at::tensor({4, 5, 6, 12, 13}, at::kLong);
  Replay(key, slots);
  interceptor_.NoteReplay();
  const Receipt receipt = interceptor_.Commit(Ints({1, 2, 4, -1}).view({2, 2}), Ints({2, 0}));
  EXPECT_TRUE(receipt.ok());
  for (int layer = 0; layer < kLayers; ++layer) {
    for (const int row : {0, 1, 2, 3}) {
      EXPECT_TRUE(at::equal(KeySlot(layer, slots[row].item<int64_t>()), key[row])) << row;
    }
    EXPECT_TRUE(at::equal(KeySlot(layer, 13), at::zeros({kHeads, kDim})));
  }
  const Interceptor::Stats stats = interceptor_.stats();
  EXPECT_EQ(stats.staged_tokens, 3);
  EXPECT_EQ(stats.committed_tokens, 2);
  EXPECT_EQ(stats.rejected_tokens, 1);
  const int64_t token_bytes = int64_t{2} * kLayers * kHeads * kDim * sizeof(float);
  EXPECT_EQ(stats.cache_bytes_written, (2 + 2) * token_bytes);
}

TEST_F(GraphRowsTest, AWriteOfSomeRowsAfterAReplayKeepsTheSlotsOfTheOthers) {
  interceptor_.Begin({{3}, {2}, {}});
  const at::Tensor key = Rows(3), again = Rows(1);
  Replay(key, at::tensor({4, 5, 6}, at::kLong));
  interceptor_.NoteReplay();
  interceptor_.Write(Name(0), again, again, Ints({5}).to(at::kLong), std::vector<int32_t>{1});
  EXPECT_TRUE(interceptor_.Commit(Ints({1, 2}).view({1, 2}), Ints({2})).ok());
  EXPECT_TRUE(at::equal(KeySlot(0, 5), again[0]));
  EXPECT_TRUE(at::equal(KeySlot(0, 6), key[2]));
  EXPECT_TRUE(at::equal(KeySlot(1, 5), key[1]));
  EXPECT_TRUE(at::equal(KeySlot(1, 6), key[2]));
}

TEST_F(GraphRowsTest, WithoutAReplayTheRoundIsIncomplete) {
  interceptor_.Begin({{2}, {1}, {}});
  const Receipt receipt = interceptor_.Commit(Ints({1}).view({1, 1}), Ints({1}));
  EXPECT_FALSE(receipt.ok());
  EXPECT_EQ(receipt.degraded, BypassReason::kIncompleteStaging);
}

TEST_F(GraphRowsTest, AReplayAfterAWriteIsAnError) {
  interceptor_.Begin({{2}, {1}, {}});
  interceptor_.Write(Name(0), Rows(2), Rows(2), at::tensor({4, 5}, at::kLong));
  EXPECT_THROW(interceptor_.NoteReplay(), Error);
  interceptor_.Abort();
  EXPECT_THROW(interceptor_.NoteReplay(), Error);
}

TEST_F(GraphRowsTest, AReplayThatIsRefusedMarksNoLayer) {
  interceptor_.Begin({{2}, {1}, {}});
  interceptor_.Write(Name(1), Rows(2), Rows(2), at::tensor({4, 5}, at::kLong));
  EXPECT_THROW(interceptor_.NoteReplay(), Error);
  const Receipt receipt = interceptor_.Commit(Ints({1}).view({1, 1}), Ints({1}));
  EXPECT_EQ(receipt.degraded, BypassReason::kIncompleteStaging);
  EXPECT_EQ(interceptor_.stats().stage_operations, 1);
}

TEST_F(GraphRowsTest, ACapturedRoundIsNotCounted) {
  EXPECT_TRUE(interceptor_.Begin({{3}, {2}, {}}, /*capture=*/true).stage);
  for (int layer = 0; layer < kLayers; ++layer) {
    const at::Tensor slots = at::tensor({4, 5, 6}, at::kLong);
    EXPECT_EQ(interceptor_.Write(Name(layer), Rows(3), Rows(3), slots).action, Action::kStage);
  }
  EXPECT_THROW(interceptor_.Commit(Ints({1}).view({1, 1}), Ints({1})), Error);
  EXPECT_THROW(interceptor_.NoteReplay(), Error);
  interceptor_.Abort();
  const Interceptor::Stats stats = interceptor_.stats();
  EXPECT_EQ(stats.rounds, 0);
  EXPECT_EQ(stats.aborted_rounds, 0);
  EXPECT_EQ(stats.staged_tokens, 0);
  EXPECT_EQ(stats.stage_operations, 0);
  EXPECT_EQ(stats.cache_bytes_written, 0);
}

TEST_F(GraphRowsTest, CapturingNeedsFixedRows) {
  Interceptor plain{NworConfig{}};
  plain.BindLayer("layer", keys_[0], values_[0]);
  EXPECT_THROW(plain.Begin({{3}, {2}, {}}, /*capture=*/true), Error);
}

TEST_F(GraphRowsTest, CapturesNoMoreThanFixedRows) {
  EXPECT_EQ(MessageOf([&] {
              interceptor_.Begin({{13}, {5}, {}}, /*capture=*/true);
            }),
            "capture: got 13 rows of 1 requests, expected at most graph_rows = 12 of each");
  const std::vector<int32_t> nothing(13, 0);
  EXPECT_EQ(MessageOf([&] {
              interceptor_.Begin({nothing, nothing, {}}, /*capture=*/true);
            }),
            "capture: got 0 rows of 13 requests, expected at most graph_rows = 12 of each");
  interceptor_.Begin({{12}, {5}, {}}, /*capture=*/true);
  interceptor_.Abort();
}

TEST_F(GraphRowsTest, NoGraphHasStagedARoundThatIsLarger) {
  interceptor_.Begin({{13}, {5}, {}});
  EXPECT_EQ(MessageOf([&] { interceptor_.NoteReplay(); }),
            "note_replay: got a round of 13 rows and 1 requests, expected at most graph_rows = 12 "
            "of each");
  interceptor_.Abort();
}

TEST_F(GraphRowsTest, GraphsThatDoNotStageHaveStagedNoRound) {
  EXPECT_FALSE(interceptor_.Begin({{10}, {9}, {}}, /*capture=*/true).stage);
  interceptor_.Abort();
  EXPECT_TRUE(interceptor_.Begin({{3}, {2}, {}}).stage);
  EXPECT_THROW(interceptor_.NoteReplay(), Error);
  interceptor_.Abort();
  EXPECT_TRUE(interceptor_.Begin({{3}, {2}, {}}, /*capture=*/true).stage);
  interceptor_.Abort();
  EXPECT_TRUE(interceptor_.Begin({{3}, {2}, {}}).stage);
  interceptor_.NoteReplay();
  interceptor_.Abort();
}

TEST_F(GraphRowsTest, GraphsCapturedWithoutMemoryKeepAllRoundsDirect) {
  {
    const ShortMemory memory(512);
    EXPECT_EQ(interceptor_.Begin({{3}, {2}, {}}, /*capture=*/true).reason,
              BypassReason::kOutOfMemory);
    interceptor_.Abort();
  }
  EXPECT_FALSE(interceptor_.Begin({{3}, {2}, {}}, /*capture=*/true).stage);
  interceptor_.Abort();
  std::vector<std::string> logged;
  interceptor_.SetLogSink(
      [&](BypassReason, std::string_view message) { logged.emplace_back(message); });
  for (int round = 0; round < 200; ++round) {
    const Decision decision = interceptor_.Begin({{3}, {2}, {}});
    ASSERT_EQ(decision.reason, BypassReason::kOutOfMemory);
    interceptor_.NoteReplay();
    ASSERT_TRUE(interceptor_.Commit(Ints({1}).view({1, 1}), Ints({1})).ok());
  }
  EXPECT_EQ(logged, std::vector<std::string>{
                        "there was no memory for staging: got none for 8 draft rows when graphs "
                        "were captured, so drafts are never staged"});
  EXPECT_EQ(interceptor_.stats().staging_bytes, 0);
  EXPECT_EQ(interceptor_.stats().staged_tokens, 0);
}

TEST_F(GraphRowsTest, ACaptureAsksForMemoryThatRoundsHaveNotFound) {
  {
    const ShortMemory memory(512);
    EXPECT_EQ(interceptor_.Begin({{3}, {2}, {}}).reason, BypassReason::kOutOfMemory);
    interceptor_.Abort();
  }
  EXPECT_FALSE(interceptor_.Begin({{3}, {2}, {}}).stage) << "not tried so soon";
  interceptor_.Abort();
  EXPECT_TRUE(interceptor_.Begin({{3}, {2}, {}}, /*capture=*/true).stage);
  interceptor_.Abort();
  EXPECT_TRUE(interceptor_.Begin({{3}, {2}, {}}).stage);
  interceptor_.NoteReplay();
  interceptor_.Abort();
}

TEST(RoundTables, StandAtTheirPlaceWithRowsBeyondThemDirect) {
  const at::Tensor fixed = at::full({RoundTables::FixedWords(6)}, 99, at::kInt);
  const RoundTables tables({{2, 1}, {1, 0}, {}}, true, at::kCPU, fixed, 6);
  EXPECT_EQ(tables.device_stage_rows(), fixed.const_data_ptr());
  const std::vector<int> expected{-1, 0, -1, -1, -1, -1};
  EXPECT_TRUE(at::equal(fixed.narrow(0, 0, 6), at::tensor(expected, at::kInt)));
  EXPECT_EQ(tables.row_base()[1], 2);
  EXPECT_EQ(tables.request_rows()[2], 1);
  EXPECT_EQ(tables.tips()[1], -1);
}

TEST(RoundTables, ALargerRoundHasMemoryOfItsOwn) {
  const at::Tensor fixed = at::full({RoundTables::FixedWords(2)}, 99, at::kInt);
  const RoundTables tables({{3}, {2}, {}}, true, at::kCPU, fixed, 2);
  EXPECT_NE(tables.device_stage_rows(), fixed.const_data_ptr());
  EXPECT_TRUE(at::equal(fixed, at::full({RoundTables::FixedWords(2)}, 99, at::kInt)));
  EXPECT_EQ(tables.device_stage_rows()[2], 1);
}

}  // namespace
}  // namespace nwor
