#include "specpv/partial_cache.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "specpv/verify_policy.h"

// What the policy never decides but a host might do, and hosts that learn later of commits.

namespace nwor {
namespace {

TEST(PartialCache, WantsAFullStepWhenItsTailOverflowed) {
  SpecPVConfig config;
  config.enable_specpv = true;
  config.specpv_n_spec_tokens_buf = 0;
  PartialCache cache(config, /*max_rows=*/4);
  cache.Prefill(10000);
  StepDecision decision;
  decision.kind = StepKind::kPartial;
  decision.num_rows = 4;
  decision.full_len = decision.committed_len = 10000;
  cache.Finish(decision, /*accepted=*/3, /*disagreed=*/-1);
  EXPECT_EQ(cache.required(), FullTrigger::kNone);  // as many as the tail holds
  decision.committed_len = 10004;
  cache.Finish(decision, /*accepted=*/0, /*disagreed=*/-1);
  EXPECT_EQ(cache.required(), FullTrigger::kTailOverflow);
  const StepDecision next = VerifyPolicy(config).Decide(cache, 1);
  EXPECT_EQ(next.kind, StepKind::kFullRefresh);
  EXPECT_EQ(next.trigger, FullTrigger::kTailOverflow);
}

SpecPVConfig RefreshConfig() {
  SpecPVConfig config;
  config.enable_specpv = true;
  config.specpv_mode = SpecPVMode::kRefresh;
  config.specpv_n_retrieval_blocks = 2;  // 12 blocks of 16 tokens are seen
  config.specpv_n_spec_tokens_buf = 8;
  return config;
}

TEST(PartialCache, CountsTheTailFromWhereBlocksWereSelected) {
  const SpecPVConfig config = RefreshConfig();
  const VerifyPolicy policy(config);
  PartialCache cache(config, /*max_rows=*/4);
  const auto decide = [&](int64_t context) {
    cache.Reach(context);
    const StepDecision decision = policy.Decide(cache, 4);
    cache.FinishLater(decision);
    return decision.trigger;
  };
  EXPECT_EQ(policy.AlwaysFullTokens(cache.budget()), 192);
  EXPECT_EQ(decide(192), FullTrigger::kShortContext);
  EXPECT_EQ(decide(196), FullTrigger::kFirst);
  EXPECT_EQ(cache.full_len(), 196);
  EXPECT_EQ(decide(200), FullTrigger::kNone);
  EXPECT_EQ(decide(204), FullTrigger::kNone);  // 8 tokens and 4 rows: as many as the tail holds
  EXPECT_EQ(cache.tail_len(), 8);
  EXPECT_EQ(cache.partial_steps(), 2);
  EXPECT_EQ(decide(205), FullTrigger::kTailFull);
  cache.RequireFull(FullTrigger::kRefreshFailure);
  EXPECT_EQ(decide(206), FullTrigger::kRefreshFailure);
  EXPECT_EQ(decide(203), FullTrigger::kNone);  // the context had been taken for longer than it was
  cache.Restart(210);
  EXPECT_FALSE(cache.selected());
  EXPECT_EQ(decide(211), FullTrigger::kFirst);
}

TEST(PartialCache, KeepsItsViewInAStepWithoutRoomForIt) {
  const SpecPVConfig config = RefreshConfig();
  const VerifyPolicy policy(config);
  PartialCache cache(config, /*max_rows=*/4);
  cache.Prefill(200);
  cache.Finish(policy.Decide(cache, 4), /*accepted=*/0);
  const int64_t anchor = cache.anchor_len(), full = cache.full_len();
  const StepDecision without = policy.Decide(cache, 4, /*viewable=*/false);
  EXPECT_EQ(without.kind, StepKind::kFull);
  EXPECT_EQ(without.trigger, FullTrigger::kPolicy);
  EXPECT_TRUE(without.keeps_view);
  EXPECT_EQ(cache.Finish(without, /*accepted=*/2).emitted, 3);
  EXPECT_TRUE(cache.selected());
  EXPECT_EQ(cache.anchor_len(), anchor);
  EXPECT_EQ(cache.full_len(), full);
  EXPECT_EQ(cache.tail_len(), 3);
  EXPECT_EQ(policy.Decide(cache, 4).kind, StepKind::kPartial);
}

TEST(PartialCache, LetsOnlyModeRefreshLearnLater) {
  SpecPVConfig config = RefreshConfig();
  config.specpv_mode = SpecPVMode::kLossless;
  PartialCache cache(config, /*max_rows=*/4);
  cache.Prefill(500);
  const VerifyPolicy policy(config);
  EXPECT_THROW(cache.Reach(501), Error);
  EXPECT_THROW(cache.FinishLater(policy.Decide(cache, 1)), Error);
  EXPECT_THROW(policy.Decide(cache, 1, /*viewable=*/false), Error);
  EXPECT_THROW(cache.Restart(-1), Error);
}

}  // namespace
}  // namespace nwor
