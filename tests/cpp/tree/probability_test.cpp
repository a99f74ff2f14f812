#include "tree/probability.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace nwor {
namespace {

TEST(Probability, IsExactWhereFloatIs) {
  EXPECT_EQ(FixedProbability(0.0f), 0u);
  EXPECT_EQ(FixedProbability(1.0f), kProbabilityOne);
  EXPECT_EQ(FixedProbability(0.375f), kProbabilityOne / 8 * 3);
  EXPECT_EQ(FixedProbability(std::ldexp(1.0f, -43)), 1u);
  EXPECT_EQ(FixedProbability(std::ldexp(1.0f, -44)), 0u);
}

TEST(Probability, RefusesWhatIsNone) {
  for (const float p : {0.0f, 0.5f, 1.0f, 1.0005f}) EXPECT_TRUE(IsProbability(p)) << p;
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float p : {-1e-9f, 1.01f, infinity, -infinity, std::nanf("")}) {
    EXPECT_FALSE(IsProbability(p)) << p;
    EXPECT_FALSE(IsCoin(p)) << p;
  }
}

// The largest vocabulary, every entry as large as it may be: the sum is seen, not wrapped around.
TEST(Probability, NoSumOfARowOverflows) {
  const uint64_t largest = FixedProbability(1.0f + kProbabilityTolerance);
  const uint64_t sum = largest * static_cast<uint64_t>(kMaxVocabulary);
  EXPECT_EQ(sum / static_cast<uint64_t>(kMaxVocabulary), largest);
  EXPECT_FALSE(SumsToOne(sum));
  EXPECT_TRUE(SumsToOne(kProbabilityOne));
  EXPECT_FALSE(SumsToOne(0));
}

TEST(Probability, ACoinOfOneStaysWithinTheMass) {
  for (const uint64_t mass : {uint64_t{1}, uint64_t{7}, kProbabilityOne}) {
    EXPECT_EQ(PlaceOfCoin(1.0f, mass), mass - 1);
    EXPECT_EQ(PlaceOfCoin(0.0f, mass), 0u);
    EXPECT_LT(PlaceOfCoin(0.99999994f, mass), mass);
  }
  EXPECT_EQ(FixedCoin(1.0f, 1.0), kProbabilityOne);  // below no mass of at most one
}

TEST(Probability, ExcessNeverGoesBelowNothing) {
  EXPECT_EQ(FixedExcess(0.75f, 0.5f), kProbabilityOne / 4);
  EXPECT_EQ(FixedExcess(0.5f, 0.75f), 0u);
}

}  // namespace
}  // namespace nwor
