#include "attention/merge/merge_state.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/check.h"
#include "message_of.h"

namespace nwor {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Attention of one query over scalars, as a state: logits and values are plain numbers.
struct Tokens {
  std::vector<double> logits, values;

  double Lse() const {
    double sum = 0.0;
    for (const double logit : logits) sum += std::exp(logit);
    return std::log(sum);
  }
  double Out() const {
    double out = 0.0;
    for (size_t i = 0; i < logits.size(); ++i) out += std::exp(logits[i] - Lse()) * values[i];
    return out;
  }
};

TEST(MergeStates, PartsOfTheTokensMergeToTheWhole) {
  Tokens whole;
  std::vector<at::Tensor> outs, lses;
  for (int part = 0; part < 40; ++part) {
    Tokens tokens;
    for (int i = 0; i <= part % 3; ++i) {
      tokens.logits.push_back(std::sin(part * 7.0 + i) * 5.0);
      tokens.values.push_back(std::cos(part * 3.0 - i));
    }
    outs.push_back(at::full({1, 1, 8}, tokens.Out(), at::kFloat));
    lses.push_back(at::full({1, 1}, tokens.Lse(), at::kFloat));
    whole.logits.insert(whole.logits.end(), tokens.logits.begin(), tokens.logits.end());
    whole.values.insert(whole.values.end(), tokens.values.begin(), tokens.values.end());
  }
  const auto [out, lse] = MergeStates(outs, lses);
  EXPECT_NEAR(out[0][0][7].item<float>(), whole.Out(), 2e-6);
  EXPECT_NEAR(lse.item<float>(), whole.Lse(), 2e-6);
}

TEST(MergeStates, FarApartStatesKeepTheLargerOne) {
  const at::Tensor small = at::full({2, 3, 4}, 1.0f), large = at::full({2, 3, 4}, 2.0f);
  const auto [out, lse] =
      MergeStates({small, large}, {at::full({2, 3}, -500.0f), at::full({2, 3}, 500.0f)});
  EXPECT_TRUE(at::equal(out, large));
  EXPECT_TRUE(at::equal(lse, at::full({2, 3}, 500.0f)));
}

TEST(MergeStates, NothingSeenGivesZerosAndMinusInfinity) {
  const at::Tensor garbage = at::full({1, 2, 8}, std::numeric_limits<float>::quiet_NaN());
  const at::Tensor nothing = at::full({1, 2}, -kInfinity);
  const auto [out, lse] = MergeStates({garbage, garbage}, {nothing, nothing});
  EXPECT_TRUE(at::equal(out, at::zeros({1, 2, 8})));
  EXPECT_TRUE(at::equal(lse, nothing));
}

TEST(MergeStates, OfFlashAttentionAnInfiniteLseMeansNothingSeen) {
  const at::Tensor garbage = at::full({1, 2, 8}, std::numeric_limits<float>::quiet_NaN());
  const at::Tensor state = at::randn({1, 2, 8}), lse = at::randn({1, 2});
  const at::Tensor infinite = at::full({1, 2}, kInfinity);
  const at::Tensor out = at::empty({1, 2, 8}), merged = at::empty({1, 2});
  MergeStatesInto({garbage, state}, {infinite, lse}, out, merged, /*num_flash=*/1);
  EXPECT_TRUE(at::equal(out, state));
  EXPECT_TRUE(at::equal(merged, lse));
  // Of anyone else it is a sum that overflowed, and must show.
  MergeStatesInto({garbage, state}, {infinite, lse}, out, merged);
  EXPECT_FALSE(out.isfinite().any().item<bool>());
}

TEST(MergeStates, WritesIntoStridedMemoryOfTheCallers) {
  const at::Tensor state = at::randn({3, 2, 8}), lse = at::randn({3, 2});
  const at::Tensor room = at::full({3, 4, 8}, -7.0f);
  MergeStatesInto({state, state}, {lse, lse}, room.narrow(1, 1, 2), at::Tensor());
  EXPECT_TRUE(at::allclose(room.narrow(1, 1, 2), state));
  EXPECT_TRUE(room.select(1, 0).eq(-7.0f).all().item<bool>());
  EXPECT_TRUE(room.select(1, 3).eq(-7.0f).all().item<bool>());
}

TEST(MergeStates, RefusesStatesThatDoNotFit) {
  const at::Tensor out = at::zeros({3, 2, 8}), lse = at::zeros({3, 2});
  EXPECT_THROW(MergeStates({}, {}), Error);
  EXPECT_THROW(MergeStates({out}, {}), Error);
  EXPECT_THROW(MergeStates({out, out.narrow(0, 0, 2)}, {lse, lse}), Error);
  EXPECT_THROW(MergeStates({out}, {lse.to(at::kDouble)}), Error);
  EXPECT_EQ(MessageOf([&] { MergeStates({out.narrow(2, 0, 0)}, {lse}); }),
            "outs[0]: got sizes [3, 2, 0], expected [rows, heads, channels] with at least one "
            "channel");
  const at::Tensor out_elsewhere = out.to(at::kMeta), lse_elsewhere = lse.to(at::kMeta);
  EXPECT_EQ(MessageOf([&] {
              MergeStates({out, out_elsewhere}, {lse, lse});
            }),
            "outs[1]: got a tensor on meta, expected cpu");
  EXPECT_EQ(MessageOf([&] {
              MergeStates({out, out, out}, {lse, lse, lse_elsewhere});
            }),
            "lses[2]: got a tensor on meta, expected cpu");
}

}  // namespace
}  // namespace nwor
