#include <memory>
#include <random>

#include "kv_interceptor/checker_fixture.h"
#include "test_seed.h"

// The checker says nothing about correct rounds, whatever their shape.

namespace nwor {
namespace {

using ContractSilence = ContractCheckerTest;

TEST_F(ContractSilence, AboutAChain) {
  BeginAndWrite();
  EXPECT_SILENT(checker_.VerifyStaged());
  const Receipt receipt = Accept(2);
  EXPECT_SILENT(checker_.Verify(&receipt, {2, 0}));
}

TEST_F(ContractSilence, AboutAnAscendingPath) {
  BeginAndWrite(/*ascending=*/true);
  EXPECT_SILENT(checker_.VerifyStaged());
  const Receipt receipt = Accept(1, true, /*first=*/3);
  EXPECT_SILENT(checker_.Verify(&receipt, {1, 0}));
}

TEST_F(ContractSilence, AboutAnAbort) {
  BeginAndWrite();
  interceptor_.Abort();
  EXPECT_SILENT(checker_.Verify(nullptr, {0, 0}));
}

TEST_F(ContractSilence, AboutChunkedCommits) {
  BeginAndWrite();
  const Receipt first = Accept(1, /*last=*/false);
  EXPECT_SILENT(checker_.Verify(&first));
  const Receipt second = Accept(2, /*last=*/true, /*first=*/2);
  EXPECT_SILENT(checker_.Verify(&second, {3, 0}));
}

TEST_F(ContractSilence, AboutARefusedCommit) {
  BeginAndWrite();
  EXPECT_THROW(Accept(2, true, /*first=*/2), Error);
  const Receipt receipt = Accept(1);
  EXPECT_SILENT(checker_.Verify(&receipt, {1, 0}));
}

TEST_F(ContractSilence, AboutAFailedCommitThatWasUndone) {
  FaultyWriter writer;
  writer.fails = true;
  interceptor_.SetCacheWriter(&writer);
  BeginAndWrite();
  const Receipt receipt = Accept(3);
  EXPECT_FALSE(receipt.ok());
  EXPECT_SILENT(checker_.Verify(&receipt, {3, 0}));
}

TEST_F(ContractSilence, AboutDuplicatesAndSubsetsInAnyOrder) {
  ASSERT_TRUE(interceptor_.Begin(kPlan).stage);
  for (int layer : {2, 0, 1}) {
    interceptor_.Write(Name(layer), Rows(3), Rows(3), Slots({8, 13, 5}),
                       std::vector<int32_t>{3, 5, 0});
    interceptor_.Write(Name(layer), Rows(4), Rows(4), Slots({7, 6, 14, 12}),
                       std::vector<int32_t>{2, 1, 6, 4});
    interceptor_.Write(Name(layer), Rows(1), Rows(1), Slots({7}), std::vector<int32_t>{2});
  }
  EXPECT_SILENT(checker_.VerifyStaged());
  const Receipt receipt = Accept(3);
  EXPECT_SILENT(checker_.Verify(&receipt, {3, 0}));
}

TEST_F(ContractSilence, AboutASlotMismatchThatFellBack) {
  ASSERT_TRUE(interceptor_.Begin(kPlan).stage);
  interceptor_.Write(Name(0), Rows(7), Rows(7), Slots(kSlots));
  std::vector<int64_t> other = kSlots;
  other[2] = 20;
  const at::Tensor key = Rows(7), value = Rows(7);
  EXPECT_EQ(interceptor_.Write(Name(1), key, value, Slots(other)).action, Action::kBypass);
  for (size_t i = 0; i < other.size(); ++i) {  // the engine's own write
    Slot(keys_, 1, other[i]).copy_(key[static_cast<int64_t>(i)]);
    Slot(values_, 1, other[i]).copy_(value[static_cast<int64_t>(i)]);
  }
  interceptor_.Write(Name(2), Rows(7), Rows(7), Slots(kSlots));
  EXPECT_SILENT(checker_.VerifyStaged());
  const Receipt receipt = Accept(1);
  EXPECT_FALSE(receipt.ok());
  EXPECT_SILENT(checker_.Verify(&receipt));
}

TEST_F(ContractSilence, WhenSwitchedOffAndTheEngineWrites) {
  interceptor_.SetEnabled(false);
  checker_.Snapshot();
  EXPECT_FALSE(interceptor_.Begin(kPlan).stage);
  WriteAll();
  for (const int64_t slot : kSlots) Slot(keys_, 1, slot).fill_(3);
  const Receipt receipt = Accept(1);
  EXPECT_SILENT(checker_.Verify(&receipt));
}

TEST_F(ContractSilence, AboutARoundThatDoesNotFit) {
  NworConfig config;
  config.max_staging_bytes = 64;
  Interceptor small(config);
  small.BindLayer("a", keys_[0], values_[0]);
  ContractChecker checker(small);
  checker.Snapshot();
  const Decision decision = small.Begin(kPlan);
  EXPECT_FALSE(decision.stage);
  EXPECT_EQ(decision.reason, BypassReason::kCapacity);
  small.Write("a", Rows(7), Rows(7), Slots(kSlots));
  EXPECT_SILENT(checker.VerifyStaged());
  small.Abort();
  EXPECT_SILENT(checker.Verify(nullptr));
}

TEST_F(ContractSilence, AboutPaddingBeyondThePlan) {
  NworConfig config;
  config.graph_rows = 12;
  Interceptor padded{config};
  for (size_t layer = 0; layer < keys_.size(); ++layer) {
    padded.BindLayer(Name(static_cast<int>(layer)), keys_[layer], values_[layer]);
  }
  ContractChecker checker{padded};
  checker.Snapshot();
  padded.Begin({{3}, {2}, {}});
  // What a graph's padding holds is of some step before.
  for (size_t layer = 0; layer < keys_.size(); ++layer) {
    padded.Write(Name(static_cast<int>(layer)), Rows(5), Rows(5), Slots({4, 5, 6, 12, 13}));
  }
  EXPECT_SILENT(checker.VerifyStaged());
  padded.Abort();
  EXPECT_SILENT(checker.Verify(nullptr));
}

TEST_F(ContractSilence, OfAnEarlierCheckerThatEnds) {
  auto earlier = std::make_unique<ContractChecker>(interceptor_);
  ContractChecker checker{interceptor_};
  earlier.reset();
  checker.Snapshot();
  BeginAndWrite();
  const Receipt receipt = Accept(2);
  EXPECT_SILENT(checker.Verify(&receipt, {2, 0}));
}

TEST_F(ContractSilence, AcceptsHonestHostBooks) {
  checker_.TellFreeSlots(12);
  checker_.TellRequest(0, 5, 2, kPageSize);
  BeginAndWrite();
  const Receipt receipt = Accept(3);
  checker_.TellRequest(0, 5 + 1 + 3, 3, kPageSize);
  checker_.TellFreeSlots(12 - kPageSize);
  EXPECT_SILENT(checker_.Verify(&receipt));
}

// Random rounds over random layouts, rows in pieces, trees, groups, chunks and aborts.
class ContractSilenceOfDType : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(ContractSilenceOfDType, OverRandomRounds) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  at::manual_seed(seed);
  const auto pick = [&](int64_t low, int64_t high) {  // inclusive
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const bool fp8 = GetParam() == at::ScalarType::Float8_e4m3fn;
  const at::ScalarType row_dtype = fp8 ? at::kBFloat16 : GetParam();

  Interceptor interceptor{NworConfig{}};
  ContractChecker checker(interceptor);
  std::vector<at::Tensor> kept;
  const int num_layers = 3;
  for (int layer = 0; layer < num_layers; ++layer) {
    // Packed K|V, head-major: [P, H, S, 2D].
    const at::Tensor cache =
        at::randn({kPages, kHeads, kPageSize, 2 * kDim}).to(GetParam()).transpose(1, 2);
    std::optional<at::Tensor> k_scale, v_scale;
    if (fp8) {
      k_scale = at::rand({kHeads}) + 0.1;
      v_scale = at::rand({1}) + 0.1;
      kept.insert(kept.end(), {*k_scale, *v_scale});
    }
    interceptor.BindLayer("layer" + std::to_string(layer), cache.narrow(3, 0, kDim),
                          cache.narrow(3, kDim, kDim), layer == 2 ? 1 : 0, k_scale, v_scale,
                          row_dtype);
  }
  for (int round = 0; round < 150; ++round) {
    if (round % 3 == 0) checker.Snapshot();
    RoundPlan plan;
    for (int64_t b = pick(1, 3); b > 0; --b) {
      const int64_t drafts = pick(0, 4), direct = pick(1, 2);
      plan.query_lens.push_back(static_cast<int32_t>(drafts + direct));
      plan.num_drafts.push_back(static_cast<int32_t>(drafts));
      plan.parents.emplace_back();
      for (int64_t i = 0; i < drafts; ++i) {
        plan.parents.back().push_back(static_cast<int32_t>(pick(direct - 1, direct + i - 1)));
      }
    }
    const int64_t num_rows = plan.num_rows();
    std::vector<std::vector<int64_t>> slots(2);
    for (auto& group : slots) {
      std::vector<int64_t> all(kPages * kPageSize);
      for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
      std::shuffle(all.begin(), all.end(), random);
      group.assign(all.begin(), all.begin() + num_rows);
    }
    const bool staged = interceptor.Begin(plan).stage;
    for (int layer = 0; layer < num_layers; ++layer) {
      std::vector<int32_t> order(num_rows);
      for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
      std::shuffle(order.begin(), order.end(), random);
      for (size_t at = 0; at < order.size();) {
        const size_t end = std::min(order.size(), at + static_cast<size_t>(pick(1, num_rows)));
        const std::vector<int32_t> rows(order.begin() + static_cast<int64_t>(at),
                                        order.begin() + static_cast<int64_t>(end));
        std::vector<int64_t> row_slots;
        for (const int32_t row : rows) row_slots.push_back(slots[layer == 2 ? 1 : 0][row]);
        const auto n = static_cast<int64_t>(rows.size());
        interceptor.Write("layer" + std::to_string(layer),
                          (at::randn({n, kHeads, kDim}) * 100).to(row_dtype),
                          at::randn({n, kHeads, kDim}).to(row_dtype), at::tensor(row_slots), rows);
        at = end;
      }
    }
    EXPECT_SILENT(checker.VerifyStaged());
    if (!staged || pick(0, 4) == 0) {
      interceptor.Abort();
      EXPECT_SILENT(checker.Verify(nullptr));
      continue;
    }
    // Walk down each tree, then commit the paths in two chunks.
    const auto num_requests = static_cast<int64_t>(plan.query_lens.size());
    std::vector<std::vector<int32_t>> paths(num_requests);
    std::vector<int64_t> emitted(num_requests);
    for (int64_t b = 0; b < num_requests; ++b) {
      int32_t at = plan.query_lens[b] - plan.num_drafts[b] - 1;
      for (int32_t i = 0; i < plan.num_drafts[b]; ++i) {
        const int32_t row = plan.query_lens[b] - plan.num_drafts[b] + i;
        if (plan.parents[b][i] != at || pick(0, 3) == 0) continue;
        paths[b].push_back(row);
        at = row;
      }
      emitted[b] = static_cast<int64_t>(paths[b].size());
    }
    Receipt receipt;
    for (const bool last : {false, true}) {
      at::Tensor path = at::full({num_requests, 4}, -1, at::kInt);
      at::Tensor counts = at::zeros({num_requests}, at::kInt);
      for (int64_t b = 0; b < num_requests; ++b) {
        const auto take = last ? static_cast<int64_t>(paths[b].size())
                               : pick(0, static_cast<int64_t>(paths[b].size()));
        for (int64_t i = 0; i < take; ++i) path[b][i] = paths[b][i];
        counts[b] = take;
        paths[b].erase(paths[b].begin(), paths[b].begin() + take);
      }
      receipt = interceptor.Commit(path, counts, {}, RowSpace::kRequest, last);
    }
    EXPECT_SILENT(checker.Verify(&receipt, emitted));
  }
}

INSTANTIATE_TEST_SUITE_P(DTypes, ContractSilenceOfDType,
                         ::testing::Values(at::kFloat, at::kHalf, at::kBFloat16,
                                           at::ScalarType::Float8_e4m3fn));

}  // namespace
}  // namespace nwor
