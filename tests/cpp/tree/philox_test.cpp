#include "tree/philox.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace nwor {
namespace {

std::vector<uint32_t> Words(const PhiloxBlock& block) {
  return {block.word[0], block.word[1], block.word[2], block.word[3]};
}

// The known answers that the authors publish with the generator.
TEST(Philox, GivesTheKnownAnswers) {
  EXPECT_EQ(Words(Philox({{0, 0, 0, 0}}, 0, 0)),
            (std::vector<uint32_t>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  EXPECT_EQ(Words(Philox({{ones, ones, ones, ones}}, ones, ones)),
            (std::vector<uint32_t>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      Words(Philox({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0)),
      (std::vector<uint32_t>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, CoinsDifferInEveryPartOfTheirPlace) {
  std::set<float> seen;
  for (const uint64_t seed : {uint64_t{1}, uint64_t{1} << 40, ~uint64_t{0}}) {
    for (const uint64_t position : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 35}) {
      for (const CoinPurpose purpose : {CoinPurpose::kAccept, CoinPurpose::kFinal}) {
        const float coin = CoinAt(seed, position, purpose);
        EXPECT_GE(coin, 0.0f);
        EXPECT_LT(coin, 1.0f);
        seen.insert(coin);
      }
    }
  }
  EXPECT_EQ(seen.size(), 18u);
}

}  // namespace
}  // namespace nwor
