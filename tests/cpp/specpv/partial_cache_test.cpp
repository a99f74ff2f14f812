#include "specpv/partial_cache.h"

#include <gtest/gtest.h>

#include "specpv/verify_policy.h"

// What the policy never decides but a host might do.

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

}  // namespace
}  // namespace nwor
