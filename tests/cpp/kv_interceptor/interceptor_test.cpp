#include "kv_interceptor/interceptor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "base/check.h"
#include "base/fp8.h"
#include "kv_interceptor/interceptor_fixture.h"
#include "message_of.h"

namespace nwor {
namespace {

TEST_F(InterceptorTest, StagesDraftsAndWritesTheRootDirectly) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 1);
  EXPECT_TRUE(interceptor.Begin({{3}, {2}, {}}).stage);
  const at::Tensor key = Rows(3), value = Rows(3);
  const Outcome outcome = interceptor.Write(Layer(0), key, value, Slots({8, 9, 10}));
  EXPECT_EQ(outcome.action, Action::kStage);
  EXPECT_EQ(outcome.staged_rows, 2);
  EXPECT_TRUE(at::equal(KeySlot(0, 8), key[0]));
  EXPECT_FALSE(at::equal(KeySlot(0, 9), key[1]));
  const Receipt receipt = interceptor.Commit(Ints({1}).view({1, 1}), Ints({1}));
  EXPECT_TRUE(receipt.ok());
  EXPECT_TRUE(at::equal(KeySlot(0, 9), key[1]));
  EXPECT_FALSE(at::equal(KeySlot(0, 10), key[2]));
}

TEST_F(InterceptorTest, ADeferredWriteThatComesBackWaitsAgain) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 1);
  interceptor.Begin({{2}, {1}, {}});
  const at::Tensor key = Rows(2);
  interceptor.Write(Layer(0), key, key, Slots({8, 9}), std::nullopt, std::nullopt, /*defer=*/true);
  std::optional<DeferredWrite> write = interceptor.TakeDeferred(Layer(0));
  ASSERT_TRUE(write.has_value());
  interceptor.ReturnDeferred(Layer(0), std::move(*write));
  EXPECT_TRUE(interceptor.Commit(Ints({1}).view({1, 1}), Ints({1})).ok());
  EXPECT_TRUE(at::equal(KeySlot(0, 8), key[0]));
  EXPECT_TRUE(at::equal(KeySlot(0, 9), key[1]));
}

TEST_F(InterceptorTest, ADeferredWriteThatComesBackLateIsDropped) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 1);
  for (const bool next_is_open : {false, true}) {
    interceptor.Begin({{2}, {1}, {}});
    interceptor.Write(Layer(0), Rows(2), Rows(2), Slots({8, 9}), std::nullopt, std::nullopt,
                      /*defer=*/true);
    std::optional<DeferredWrite> write = interceptor.TakeDeferred(Layer(0));
    ASSERT_TRUE(write.has_value());
    interceptor.Abort();
    if (next_is_open) interceptor.Begin({{2}, {1}, {}});
    interceptor.ReturnDeferred(Layer(0), std::move(*write));
    if (!next_is_open) interceptor.Begin({{2}, {1}, {}});
    EXPECT_FALSE(interceptor.TakeDeferred(Layer(0)).has_value()) << next_is_open;
    interceptor.Abort();
    EXPECT_TRUE(Unchanged());
  }
}

TEST_F(InterceptorTest, CommitsATreePathToConsecutiveSlots) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor);
  // Rows: root 0, children 1 and 2 of it, 3 below 1, 4 below 2.
  interceptor.Begin({{5}, {4}, {{0, 0, 1, 2}}});
  std::vector<at::Tensor> written;
  for (int layer = 0; layer < kLayers; ++layer) {
    written.push_back(Rows(5));
    // Siblings share positions, so drafts bring no slot of their own.
    interceptor.Write(Layer(layer), written[layer], Rows(5), Slots({4, -1, -1, -1, -1}));
  }
  EXPECT_THROW(interceptor.Commit(Ints({2, 3}).view({1, 2}), Ints({2}),
                                  {Slots({5, 6}).view({1, 2})}, RowSpace::kRequest),
               Error);
  EXPECT_TRUE(interceptor
                  .Commit(Ints({2, 4}).view({1, 2}), Ints({2}), {Slots({5, 6}).view({1, 2})},
                          RowSpace::kRequest)
                  .ok());
  for (int layer = 0; layer < kLayers; ++layer) {
    EXPECT_TRUE(at::equal(KeySlot(layer, 5), written[layer][2]));
    EXPECT_TRUE(at::equal(KeySlot(layer, 6), written[layer][4]));
  }
}

TEST_F(InterceptorTest, CommitsAscendingPathsOfTreesWhoseParentsItIsNotTold) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 1);
  const RoundPlan plan{{2, 5}, {1, 4}, {}, /*ascending=*/true};
  interceptor.Begin(plan);
  const at::Tensor key = Rows(7);
  interceptor.Write(Layer(0), key, Rows(7), Slots({0, 1, 4, 5, 6, 7, 8}));
  const at::Tensor slots = Slots({1, -1, 5, 6}).view({2, 2});
  const auto commit = [&](std::vector<int> path, int count) {
    return interceptor.Commit(Ints(std::move(path)).view({2, 2}), Ints({0, count}), {slots},
                              RowSpace::kRequest);
  };
  EXPECT_THROW(commit({-1, -1, 4, 2}, 2), Error);  // descends
  EXPECT_THROW(commit({-1, -1, 2, 2}, 2), Error);  // the same row twice
  EXPECT_THROW(commit({-1, -1, 0, 2}, 2), Error);  // the root
  EXPECT_TRUE(commit({-1, -1, 2, 4}, 2).ok());
  EXPECT_TRUE(at::equal(KeySlot(0, 5), key[4]));
  EXPECT_TRUE(at::equal(KeySlot(0, 6), key[6]));
  EXPECT_FALSE(at::equal(KeySlot(0, 1), key[1]));
  // The next plan of the same sizes is one of chains again.
  interceptor.Begin({{2, 5}, {1, 4}, {}});
  interceptor.Write(Layer(0), key, Rows(7), Slots({0, 1, 4, 5, 6, 7, 8}));
  EXPECT_THROW(commit({-1, -1, 2, 4}, 2), Error);
  interceptor.Abort();
  EXPECT_NE(MessageOf([&] {
              interceptor.Begin({{2}, {1}, {{0}}, true});
            }).find("ascending"),
            std::string::npos);
}

TEST_F(InterceptorTest, TakesRowsInAnyOrderAndCountsDuplicatesOnce) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 2);
  interceptor.Begin({{3, 2}, {2, 1}, {}});
  const at::Tensor key = Rows(5), value = Rows(5), slots = Slots({4, 5, 6, 12, 13});
  const auto write = [&](int layer, std::vector<int32_t> rows) {
    const at::Tensor index = Ints(rows).to(at::kLong);
    return interceptor
        .Write(Layer(layer), key.index_select(0, index), value.index_select(0, index),
               slots.index_select(0, index), rows)
        .staged_rows;
  };
  EXPECT_EQ(write(1, {4, 0}), 1);
  EXPECT_EQ(write(0, {2}), 1);
  EXPECT_EQ(write(1, {1, 2, 3}), 2);
  EXPECT_EQ(write(0, {4, 2, 1}), 2);  // row 2 again
  EXPECT_EQ(write(0, {3, 0}), 0);
  EXPECT_TRUE(interceptor.Commit(Ints({1, 2, 4, -1}).view({2, 2}), Ints({2, 1})).ok());
  EXPECT_TRUE(at::equal(KeySlot(0, 5), key[1]));
  EXPECT_TRUE(at::equal(KeySlot(1, 6), key[2]));
  EXPECT_TRUE(at::equal(KeySlot(1, 13), key[4]));
  EXPECT_EQ(interceptor.stats().staged_tokens, 3);
  EXPECT_EQ(interceptor.stats().committed_tokens, 3);
}

TEST_F(InterceptorTest, WritesDirectlyWhenTheRoundDoesNotFit) {
  NworConfig config;
  config.staging_rows = 1;
  config.max_staging_bytes = 3 * kLayers * 2 * kHeads * kDim * 4;
  Interceptor interceptor{config};
  Bind(interceptor);
  const Decision decision = interceptor.Begin({{6}, {5}, {}});
  EXPECT_FALSE(decision.stage);
  EXPECT_EQ(decision.reason, BypassReason::kCapacity);
  const at::Tensor key = Rows(6);
  EXPECT_EQ(interceptor.Write(Layer(0), key, Rows(6), Slots({0, 1, 2, 3, 4, 5})).action,
            Action::kDirect);
  EXPECT_TRUE(at::equal(KeySlot(0, 5), key[5]));
  EXPECT_TRUE(interceptor.Commit(Ints({1}).view({1, 1}), Ints({1})).ok());
  EXPECT_LE(interceptor.stats().staging_bytes, config.max_staging_bytes);
  EXPECT_TRUE(interceptor.Begin({{3}, {2}, {}}).stage);
}

TEST_F(InterceptorTest, GrowsBetweenRoundsAndReportsItsMemory) {
  NworConfig config;
  config.staging_rows = 2;
  Interceptor interceptor{config};
  Bind(interceptor);
  const int64_t row_bytes = kLayers * 2 * kHeads * kDim * 4 + 8;
  interceptor.Begin({{2}, {1}, {}});
  EXPECT_EQ(interceptor.stats().staging_bytes, 2 * row_bytes);
  interceptor.Abort();
  interceptor.Begin({{8}, {7}, {}});
  EXPECT_EQ(interceptor.stats().staging_bytes, 7 * row_bytes);
  interceptor.Abort();
}

TEST_F(InterceptorTest, GroupsTogetherTakeNoMoreThanStagingMay) {
  const int64_t row_bytes = 2 * kHeads * kDim * 4 + 8;  // of one layer
  NworConfig config;
  config.staging_rows = 4;
  config.max_staging_bytes = 14 * row_bytes;
  Interceptor interceptor{config};
  for (const int group : {0, 1}) {
    const at::Tensor cache = at::zeros({kPages, kPageSize, kHeads, kDim});
    interceptor.BindLayer(Layer(group), cache, cache.clone(), group);
  }
  interceptor.Begin({{2}, {1}, {}});
  EXPECT_EQ(interceptor.stats().staging_bytes, 2 * 4 * row_bytes);
  interceptor.Abort();
  // Twice as many for one group fit beside what the other needs, for both they do not.
  EXPECT_TRUE(interceptor.Begin({{6}, {5}, {}}).stage);
  EXPECT_EQ(interceptor.stats().staging_bytes, (8 + 5) * row_bytes);
  interceptor.Abort();
}

TEST_F(InterceptorTest, TouchesNothingWhenSwitchedOff) {
  NworConfig config;
  config.enable_nwor = false;
  Interceptor interceptor{config};
  Bind(interceptor);
  interceptor.Begin({{3}, {2}, {}});
  EXPECT_EQ(interceptor.Write(Layer(0), Rows(3), Rows(3), Slots({4, 5, 6})).action,
            Action::kBypass);
  EXPECT_TRUE(interceptor.Commit(Ints({1}).view({1, 1}), Ints({1})).ok());
  EXPECT_TRUE(Unchanged());
  EXPECT_EQ(interceptor.stats().staging_bytes, 0);
  EXPECT_EQ(interceptor.stats().cache_bytes_written, 0);
}

TEST_F(InterceptorTest, CommitsInChunksOfOneRound) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 1);
  interceptor.Begin({{5}, {4}, {}});
  const at::Tensor key = Rows(5);
  interceptor.Write(Layer(0), key, Rows(5), Slots({-1, 5, 6, 7, 8}));
  const auto chunk = [&](int from, bool last) {
    return interceptor.Commit(Ints({from, from + 1}).view({1, 2}), Ints({2}), {}, RowSpace::kBatch,
                              last);
  };
  EXPECT_TRUE(chunk(1, /*last=*/false).ok());
  EXPECT_THROW(chunk(1, /*last=*/false), Error);  // not where the last chunk ended
  EXPECT_TRUE(chunk(3, /*last=*/true).ok());
  for (int row = 1; row < 5; ++row) EXPECT_TRUE(at::equal(KeySlot(0, 4 + row), key[row]));
  EXPECT_EQ(interceptor.stats().committed_tokens, 4);
  EXPECT_EQ(interceptor.stats().rejected_tokens, 0);
}

TEST_F(InterceptorTest, ChunksOfOneRoundHaveNoDestinationInCommon) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 1);
  interceptor.Begin({{4}, {3}, {}});
  const at::Tensor key = Rows(4);
  interceptor.Write(Layer(0), key, Rows(4), Slots({-1, 5, 6, 7}));
  const auto chunk = [&](int row, int64_t slot, bool last) {
    return interceptor.Commit(Ints({row}).view({1, 1}), Ints({1}), {Slots({slot}).view({1, 1})},
                              RowSpace::kBatch, last);
  };
  EXPECT_TRUE(chunk(1, 9, /*last=*/false).ok());
  EXPECT_TRUE(chunk(2, 10, /*last=*/false).ok());
  for (const int64_t slot : {9, 10}) {
    EXPECT_EQ(MessageOf([&] { chunk(3, slot, /*last=*/true); }),
              Concat("slots: got ", slot, " for request 0 at index 0 again, expected each ",
                     "destination once (duplicate_slot)"));
  }
  EXPECT_TRUE(at::equal(KeySlot(0, 9), key[1]));
  EXPECT_TRUE(at::equal(KeySlot(0, 10), key[2]));
  EXPECT_TRUE(chunk(3, 11, /*last=*/true).ok());

  interceptor.Begin({{2}, {1}, {}});  // another round may
  interceptor.Write(Layer(0), key.narrow(0, 0, 2), Rows(2), Slots({-1, 5}));
  EXPECT_TRUE(chunk(1, 9, /*last=*/true).ok());
}

TEST_F(InterceptorTest, ARoundOfNobodyBeginsAndEnds) {
  for (const int graph_rows : {0, 8}) {
    NworConfig config;
    config.graph_rows = graph_rows;
    Interceptor interceptor{config};
    Bind(interceptor, 1);
    EXPECT_FALSE(interceptor.Begin({{}, {}, {}}).stage);
    EXPECT_TRUE(interceptor.Commit(at::empty({0, 1}, at::kInt), at::empty({0}, at::kInt)).ok());
    EXPECT_FALSE(interceptor.Begin({{}, {}, {}}).stage);
    interceptor.Abort();
    EXPECT_TRUE(interceptor.Begin({{2}, {1}, {}}).stage);
    interceptor.Abort();
    EXPECT_TRUE(Unchanged());
  }
}

TEST_F(InterceptorTest, AnswersMetaTensorsWithoutTouchingData) {
  Interceptor interceptor{NworConfig{}};
  Bind(interceptor, 1);
  interceptor.Begin({{2}, {1}, {}});
  const at::Tensor rows = at::empty({2, kHeads, kDim}, at::device(at::kMeta));
  EXPECT_EQ(interceptor.Write(Layer(0), rows, rows, Slots({4, 5})).reason,
            BypassReason::kFakeTensor);
  EXPECT_TRUE(Unchanged());
}

TEST_F(InterceptorTest, KeepsGroupsWithTheirOwnSlotsApart) {
  Interceptor interceptor{NworConfig{}};
  std::vector<at::Tensor> caches;
  for (int i = 0; i < 4; ++i) caches.push_back(at::zeros({kPages, kPageSize, kHeads, kDim}));
  interceptor.BindLayer("full", caches[0], caches[1], 0);
  interceptor.BindLayer("window", caches[2], caches[3], 1);
  interceptor.Begin({{2}, {1}, {}});
  const at::Tensor full = Rows(2), window = Rows(2);
  interceptor.Write("full", full, full, Slots({4, 5}));
  interceptor.Write("window", window, window, Slots({14, 15}));
  EXPECT_TRUE(interceptor.Commit(Ints({1}).view({1, 1}), Ints({1})).ok());
  EXPECT_TRUE(at::equal(caches[0].view({-1, kHeads, kDim})[5], full[1]));
  EXPECT_TRUE(at::equal(caches[3].view({-1, kHeads, kDim})[15], window[1]));
  EXPECT_EQ(caches[2].view({-1, kHeads, kDim})[5].abs().sum().item<float>(), 0);
}

TEST_F(InterceptorTest, QuantisesInTheCommitExactlyAsADirectWriteDoes) {
  const auto fp8 = at::ScalarType::Float8_e4m3fn;
  const auto make = [&] {
    return at::zeros({kPages, kPageSize, kHeads, kDim}, at::kByte).view(fp8);
  };
  const at::Tensor staged_k = make(), staged_v = make(), direct_k = make(), direct_v = make();
  const at::Tensor k_scale = at::tensor({0.5f, 0.25f}), v_scale = at::tensor({0.1f});
  const at::Tensor key = (Rows(3) * 100).to(at::kBFloat16), value = Rows(3).to(at::kBFloat16);

  Interceptor staging{NworConfig{}}, direct{NworConfig{}};
  staging.BindLayer("l", staged_k, staged_v, 0, k_scale, v_scale, at::kBFloat16);
  direct.BindLayer("l", direct_k, direct_v, 0, k_scale, v_scale, at::kBFloat16);
  staging.Begin({{3}, {2}, {}});
  staging.Write("l", key, value, Slots({4, 5, 6}));
  EXPECT_TRUE(staging.Commit(Ints({1, 2}).view({1, 2}), Ints({2})).ok());
  direct.Begin({{3}, {0}, {}});
  direct.Write("l", key, value, Slots({4, 5, 6}));
  EXPECT_TRUE(at::equal(staged_k.view(at::kByte), direct_k.view(at::kByte)));
  EXPECT_TRUE(at::equal(staged_v.view(at::kByte), direct_v.view(at::kByte)));
  // And by the formula, for one channel of the second head.
  const auto expected = QuantizeE4M3(key[2][1][3].item<float>() / 0.25f);
  EXPECT_EQ(staged_k.view(at::kByte)[1][2][1][3].item<uint8_t>(), expected);
}

}  // namespace
}  // namespace nwor
