#include "drafters/ngram_trials.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/check.h"

namespace nwor {
namespace {

using Tokens = std::vector<int64_t>;

Tokens Over(const NgramTrials& trials) { return {trials.trials().begin(), trials.trials().end()}; }

TEST(NgramTrials, CountsWhatLookupsGuessRight) {
  NgramTrials trials({2, 4, 16}, 3, {1, 2, 3, 4, 5, 1, 2});
  trials.Follow({3, 4});  // 3 4 5 were looked up
  EXPECT_EQ(trials.right(), 2);
  EXPECT_EQ(Over(trials), Tokens());
  trials.Follow({9});
  EXPECT_EQ(Over(trials), Tokens({2}));
  trials.Follow({8, 7});  // nothing is like it
  EXPECT_EQ(Over(trials), Tokens({2, 0, 0}));
  EXPECT_EQ(trials.size(), 12);
}

TEST(NgramTrials, EndsWithTheLastGuess) {
  NgramTrials trials({2, 4, 16}, 2, {1, 2, 3, 4, 5, 1, 2});
  trials.Follow({3, 4, 5});  // 5 is the step's own token
  EXPECT_EQ(Over(trials), Tokens({2}));
}

TEST(NgramTrials, KeepsThoseOfTheLastTokens) {
  NgramTrials trials({2, 4, 16}, 3, {});
  for (int64_t token = 0; token < 100; ++token) trials.Follow({token});
  EXPECT_EQ(Over(trials), Tokens(NgramTrials::kWindow, 0));
}

TEST(NgramTrials, KeepsAFewLongOnes) {
  NgramTrials trials({2, 4, 16}, 100, {});
  for (int64_t token = 0; token < 40; ++token) trials.Follow({token});
  Tokens again(40);
  for (int64_t repeat = 0; repeat < 5; ++repeat) {
    for (int64_t token = 0; token < 40; ++token) again[token] = token;
    again.push_back(1000 + repeat);
    trials.Follow(again);
    again.pop_back();
  }
  EXPECT_EQ(trials.trials().size(), NgramTrials::kFewest);
}

TEST(NgramTrials, TellsMeanAndVarianceOfWhatFewerGuessesWouldBe) {
  NgramTrials trials({2, 4, 16}, 3, {1, 2, 3, 4, 5, 1, 2});
  EXPECT_EQ(trials.Right(3).count, 0);
  trials.Follow({3, 4, 9, 8, 7});  // 2, 0, 0
  EXPECT_EQ(trials.Right(3).count, 3);
  EXPECT_DOUBLE_EQ(trials.Right(3).mean, 2.0 / 3);
  EXPECT_DOUBLE_EQ(trials.Right(3).variance, 8.0 / 9);
  EXPECT_DOUBLE_EQ(trials.Right(1).mean, 1.0 / 3);
  EXPECT_DOUBLE_EQ(trials.Right(0).mean, 0.0);
  trials.Follow({1, 2, 3, 4, 9});  // 1, 2 come as they may, then 3 4 9 are right
  EXPECT_EQ(trials.right(), 3);
  EXPECT_EQ(trials.Right(3).count, static_cast<int64_t>(trials.trials().size()) + 1);
}

TEST(NgramTrials, TakesTokensInPiecesOfAnySize) {
  std::mt19937 random(7);
  std::uniform_int_distribution<int64_t> token(0, 3), piece(0, 6);
  Tokens text(400);
  for (int64_t& one : text) one = token(random);
  NgramTrials whole({2, 5, 16}, 6, {}), pieces({2, 5, 16}, 6, {});
  whole.Follow(text);
  for (auto at = text.begin(); at != text.end();) {
    const auto end = at + std::min<int64_t>(piece(random), text.end() - at);
    pieces.Follow({at, end});
    at = end;
  }
  EXPECT_EQ(Over(pieces), Over(whole));
  EXPECT_EQ(pieces.right(), whole.right());
  EXPECT_EQ(pieces.size(), 400);
}

TEST(NgramTrials, RefusesANegativeLimit) { EXPECT_THROW(NgramTrials({2, 4, 16}, -1, {}), Error); }

}  // namespace
}  // namespace nwor
