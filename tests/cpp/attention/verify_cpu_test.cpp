#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "attention/cpu/verify.h"
#include "attention/verify_step.h"
#include "base/check.h"
#include "test_seed.h"

namespace nwor {
namespace {

using testing::StepShape;
using testing::VerifyStep;

constexpr double kTolerance = 2e-5;

std::vector<StepShape> Shapes() {
  return {
      {.rows = {1}, .prefix = {0}},
      {.rows = {1}, .prefix = {1}, .heads = 1, .kv_heads = 1},
      {.rows = {1, 3}, .prefix = {700, 64}, .heads = 6, .kv_heads = 2, .head_dim = 80},
      {.rows = {4, 0, 9}, .prefix = {513, 40, 0}, .heads = 8, .kv_heads = 1, .tree = true},
      {.rows = {70}, .prefix = {1030}, .heads = 5, .kv_heads = 1, .head_dim = 128, .tree = true},
      {.rows = {6}, .prefix = {900}, .head_dim = 256, .window = 100},
      {.rows = {20}, .prefix = {70}, .head_dim = 192, .tree = true, .window = 9, .softcap = 3.0f},
      {.rows = {130}, .prefix = {0}, .heads = 3, .kv_heads = 3, .head_dim = 96},
      {.rows = {2}, .prefix = {300}, .head_dim = 72, .page_size = 7},
  };
}

TEST(VerifyCpu, EveryInstructionSetEqualsTheReference) {
  const uint32_t seed = TestSeed();
  for (const StepShape& shape : Shapes()) {
    VerifyStep step(shape, seed);
    for (const std::string& set : VerifyCpuInstructionSets(shape.head_dim)) {
      VerifyAttentionCpu(step.Params(), set);
      EXPECT_LT(step.Error(), kTolerance) << set << ", prefix " << shape.prefix[0];
    }
  }
}

TEST(VerifyCpu, TheWidestSetIsTheDefaultAndOthersAreRefused) {
  const std::vector<std::string> sets = VerifyCpuInstructionSets(64);
  ASSERT_FALSE(sets.empty());
  EXPECT_EQ(sets.back(), "generic");
  VerifyStep step({.rows = {2}, .prefix = {40}}, 1);
  VerifyAttentionCpu(step.Params());
  const std::vector<float> expected = step.out();
  VerifyAttentionCpu(step.Params(), sets.front());
  EXPECT_EQ(step.out(), expected);
  EXPECT_THROW(VerifyAttentionCpu(step.Params(), "mmx"), Error);
}

// Splits and their merge tree follow from the length; threads only share them out.
TEST(VerifyCpu, BitsDoNotDependOnTheNumberOfThreads) {
  const int before = at::get_num_threads();
  VerifyStep step({.rows = {5}, .prefix = {11'000}, .heads = 4, .kv_heads = 2, .tree = true}, 7);
  at::set_num_threads(1);
  VerifyAttentionCpu(step.Params());
  const std::vector<float> out = step.out(), lse = step.lse();
  for (const int threads : {2, 3, 5, 16}) {
    at::set_num_threads(threads);
    VerifyAttentionCpu(step.Params());
    EXPECT_EQ(step.out(), out) << threads;
    EXPECT_EQ(step.lse(), lse) << threads;
  }
  at::set_num_threads(before);
}

TEST(VerifyCpu, WritesThroughStridesAndNowhereElse) {
  VerifyStep step({.rows = {3}, .prefix = {50}}, 3);
  VerifyAttentionCpu(step.Params());
  VerifyParams params = step.Params();
  std::vector<float> wide(3 * 4 * 100, -7.0f);
  params.out = wide.data();
  params.out_strides = {400, 100};
  VerifyAttentionCpu(params);
  for (int i = 0; i < 12; ++i) {
    for (int d = 0; d < 100; ++d) {
      EXPECT_EQ(wide[i * 100 + d], d < 64 ? step.out()[i * 64 + d] : -7.0f);
    }
  }
}

TEST(VerifyCpu, ChecksNameTheEntryAndItsLimits) {
  const auto message = [](VerifyStep& step) -> std::string {
    try {
      CheckVerifyValues(step.Params());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const StepShape shape{.rows = {2, 1}, .prefix = {20, 5}};
  VerifyStep good(shape, 1);
  EXPECT_EQ(message(good), "");
  VerifyStep long_prefix(shape, 1);
  long_prefix.prefix()[1] = 81;
  EXPECT_EQ(message(long_prefix),
            "prefix_lens[1]: got 81, expected 0 .. 80 (block_table has 5 pages of 16 tokens)");
  VerifyStep bad_page(shape, 1);
  bad_page.table()[1] = 5;
  EXPECT_EQ(message(bad_page), "block_table[0, 1]: got 5, expected 0 .. 4");
  VerifyStep unused(shape, 1);
  unused.table()[2] = 1 << 30;
  EXPECT_EQ(message(unused), "");
  const StepShape idle{.rows = {2, 0}, .prefix = {20, 5}};
  VerifyStep no_rows(idle, 1);
  no_rows.table()[5] = -1;
  EXPECT_EQ(message(no_rows), "");
  no_rows.prefix()[1] = -1;
  EXPECT_EQ(message(no_rows), "prefix_lens[1]: got -1, expected 0 or more");
}

// A view is told by its lengths: one without room has no memory.
TEST(VerifyCpu, AViewWithoutRoomHidesThePrefix) {
  const StepShape shape{.rows = {2, 3}, .prefix = {20, 70}};
  VerifyStep hidden({.rows = {2, 3}, .prefix = {0, 70}}, 4);
  VerifyStep step(shape, 4);
  const std::vector<int32_t> uses = {0, -1}, none = {0, 0};
  for (const bool compact : {false, true}) {
    VerifyParams params = step.Params();
    if (compact) {
      params.compact.lens = uses.data();
    } else {
      params.view.num_blocks = uses.data();
      params.view.view_lens = none.data();
      params.view.block_size = 16;
    }
    CheckVerifyValues(params);
    VerifyAttentionCpu(params);
    const std::vector<float> out = step.out();
    VerifyParams expected = step.Params();
    expected.prefix_lens = hidden.Params().prefix_lens;
    VerifyAttentionCpu(expected);
    EXPECT_EQ(step.out(), out) << compact;
  }
}

}  // namespace
}  // namespace nwor
