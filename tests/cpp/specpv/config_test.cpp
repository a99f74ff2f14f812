#include "specpv/config.h"

#include <gtest/gtest.h>

#include "message_of.h"

namespace nwor {
namespace {

TEST(SpecPVConfig, DefaultsAreThoseOfTheDesign) {
  const SpecPVConfig config;
  const Budget budget = ChooseBudget(config, 60);
  EXPECT_EQ(budget.sink_tokens(), 32);
  EXPECT_EQ(budget.retrieval_blocks * budget.block_size, 4096);
  EXPECT_EQ(budget.window_tokens(), 128);
  EXPECT_EQ(budget.static_tokens(), 4256);
  EXPECT_EQ(budget.tail_capacity, 80);
  EXPECT_NO_THROW(config.ValidateFor(16, 60, 131072));
  EXPECT_NO_THROW(config.ValidateFor(64, 60, 131072));
}

TEST(SpecPVConfig, SelectorsHaveTheirSegmentsOnly) {
  SpecPVConfig config;
  const auto blocks = [&](Selector selector) {
    config.specpv_selector = selector;
    const Budget budget = ChooseBudget(config, 1);
    return std::array{budget.sink_blocks, budget.retrieval_blocks, budget.window_blocks};
  };
  EXPECT_EQ(blocks(Selector::kSpecPV), (std::array<int64_t, 3>{2, 256, 8}));
  EXPECT_EQ(blocks(Selector::kStreaming), (std::array<int64_t, 3>{2, 0, 8}));
  EXPECT_EQ(blocks(Selector::kSliding), (std::array<int64_t, 3>{0, 0, 8}));
  EXPECT_EQ(blocks(Selector::kQuest), (std::array<int64_t, 3>{0, 256, 8}));
}

TEST(SpecPVConfig, RefusesWithTheNumbers) {
  SpecPVConfig config;
  EXPECT_EQ(MessageOf([&] { config.ValidateFor(24, 16, 131072); }),
            "specpv_block_size: got 16, expected a divisor of the page size 24");
  EXPECT_EQ(MessageOf([&] { config.ValidateFor(16, 64, 131072, 60); }),
            "tail_capacity: got 60 tokens, expected at least 64, the rows of one tree");
  EXPECT_EQ(MessageOf([&] { config.ValidateFor(16, 16, 4256); }),
            "specpv_n_retrieval_blocks: got 256 (with 2 sink and 8 window blocks of 16 tokens a "
            "view of 4256 tokens), expected a view shorter than the longest context 4256: no step "
            "could be partial");
  EXPECT_NO_THROW(config.ValidateFor(16, 16, 4257));
  config.specpv_offload = true;
  EXPECT_NE(MessageOf([&] { config.Validate(); }).find("expected 'compact'"), std::string::npos);
  config.specpv_storage = Storage::kCompact;
  EXPECT_NO_THROW(config.Validate());
  config.specpv_selector = Selector::kSliding;
  config.specpv_n_window_blocks = 0;
  EXPECT_NE(MessageOf([&] { config.Validate(); }).find("at least one block"), std::string::npos);
}

// An eighth of the final blocks, between the window's and the configured number.
TEST(SpecPVConfig, AdaptiveBudgetFollowsItsRule) {
  SpecPVConfig config;
  config.specpv_budget = BudgetRule::kAdaptive;
  const auto blocks = [&](int64_t prompt, int64_t fresh) {
    return ChooseBudget(config, 1, prompt, fresh).retrieval_blocks;
  };
  EXPECT_EQ(blocks(0, 0), 8);
  EXPECT_EQ(blocks(1000, 24), 8);        // 64 blocks, an eighth is the window's 8
  EXPECT_EQ(blocks(1000, 25), 9);        // one token more: the 65th block
  EXPECT_EQ(blocks(16000, 384), 128);    // 1024 blocks
  EXPECT_EQ(blocks(32000, 768), 256);    // 2048 blocks
  EXPECT_EQ(blocks(131072, 1024), 256);  // never beyond the configured number
  EXPECT_EQ(blocks(INT64_MAX, INT64_MAX), 256);
  config.specpv_n_window_blocks = 0;
  EXPECT_EQ(blocks(0, 0), 1);  // a view of chosen blocks alone has one
  config.specpv_n_retrieval_blocks = 0;
  EXPECT_EQ(blocks(16000, 384), 0);
  config.specpv_n_retrieval_blocks = 256;
  config.specpv_budget = BudgetRule::kFixed;
  EXPECT_EQ(blocks(16000, 384), 256);
}

TEST(SpecPVConfig, ChoicesAreParsedAndNamed) {
  EXPECT_EQ(ParseChoice<SpecPVMode>("specpv_mode", "lossless", kSpecPVModeNames),
            SpecPVMode::kLossless);
  EXPECT_EQ(MessageOf([] { ParseChoice<Storage>("specpv_storage", "paper", kStorageNames); }),
            "specpv_storage: got 'paper', expected one of 'paged', 'compact'");
  SpecPVConfig config;
  EXPECT_EQ(config.score(), Score::kSpecPV);
  config.specpv_selector = Selector::kQuest;
  EXPECT_EQ(config.score(), Score::kQuest);
  config.specpv_score = Score::kSpecPV;
  EXPECT_EQ(config.score(), Score::kSpecPV);
}

}  // namespace
}  // namespace nwor
