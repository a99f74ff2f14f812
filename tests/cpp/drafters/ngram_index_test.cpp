#include "drafters/ngram_index.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <vector>

#include "base/check.h"
#include "drafters/vote_tree.h"

namespace nwor {
namespace {

using Tokens = std::vector<int64_t>;

DraftTree DraftFor(const Tokens& text, int64_t rows, int64_t depth, int64_t top_k,
                   NgramOptions options = {}) {
  NgramIndex index(options);
  index.Append(text);
  DraftTree tree = index.Draft(rows, depth, top_k);
  tree.Validate();
  return tree;
}

TEST(NgramIndex, DraftsWhatFollowedTheLongestMatch) {
  // "2 3" stood before twice; with "1" in front only once.
  const DraftTree tree = DraftFor({1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3}, 3, 2, 1);
  EXPECT_EQ(tree.tokens, (Tokens{3, 4, 5}));
  EXPECT_TRUE(tree.is_chain());
}

TEST(NgramIndex, BranchesWhereMatchesDisagree) {
  const DraftTree tree = DraftFor({1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3}, 5, 2, 2);
  EXPECT_EQ(tree.tokens, (Tokens{3, 4, 5, 7, 8}));
  EXPECT_EQ(tree.parents, (std::vector<int32_t>{-1, 0, 1, 0, 3}));
}

TEST(NgramIndex, RepeatsATextThatRepeatsItself) {
  const DraftTree tree = DraftFor({5, 1, 2, 1, 2, 1, 2}, 8, 7, 1);
  EXPECT_EQ(tree.tokens, (Tokens{2, 1, 2, 1, 2, 1, 2, 1}));
}

TEST(NgramIndex, GivesTheRootAloneWhereNothingMatches) {
  const DraftTree tree = DraftFor({1, 2, 3, 4}, 8, 4, 4);
  EXPECT_EQ(tree.tokens, (Tokens{4}));
  EXPECT_EQ(DraftFor({7}, 8, 4, 4).tokens, (Tokens{7}));
}

TEST(NgramIndex, ForgetsWhatIsTakenBack) {
  const char* const given = std::getenv("NWOR_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed=" << seed);
  std::mt19937_64 random(seed);
  NgramIndex index({1, 3, 8});
  Tokens text;
  for (int round = 0; round < 400; ++round) {
    const Tokens more(1 + random() % 5, static_cast<int64_t>(random() % 3));
    index.Append(more);
    text.insert(text.end(), more.begin(), more.end());
    if (random() % 3 == 0) {
      text.resize(1 + random() % text.size());
      index.Truncate(static_cast<int64_t>(text.size()));
    }
    NgramIndex fresh({1, 3, 8});
    fresh.Append(text);
    const DraftTree got = index.Draft(12, 5, 3);
    const DraftTree expected = fresh.Draft(12, 5, 3);
    ASSERT_EQ(got.tokens, expected.tokens);
    ASSERT_EQ(got.parents, expected.parents);
  }
}

TEST(NgramIndex, RefusesWrongUse) {
  EXPECT_THROW(NgramIndex({0, 3, 8}), Error);
  EXPECT_THROW(NgramIndex({4, 3, 8}), Error);
  EXPECT_THROW(NgramIndex({1, 17, 8}), Error);
  EXPECT_THROW(NgramIndex({1, 3, 0}), Error);
  NgramIndex index({1, 3, 8});
  EXPECT_THROW(index.Draft(4, 4, 4), Error);
  index.Append({1, 2});
  EXPECT_THROW(index.Truncate(3), Error);
  EXPECT_THROW(index.Draft(0, 4, 4), Error);
  EXPECT_THROW(index.Draft(4, 0, 4), Error);
  EXPECT_THROW(index.Draft(4, 4, 0), Error);
}

TEST(VoteTree, KeepsTheRowsWithTheMostVotesAndTheirParents) {
  VoteTree votes(10);
  votes.Add({1, 2, 3}, 5);
  votes.Add({1, 4}, 3);
  votes.Add({6, 7}, 6);
  const DraftTree tree = votes.Best(4, 4);
  EXPECT_EQ(tree.tokens, (Tokens{10, 1, 6, 7}));
  EXPECT_EQ(tree.parents, (std::vector<int32_t>{-1, 0, 0, 2}));
  EXPECT_EQ(votes.Best(4, 1).tokens, (Tokens{10, 1, 2, 3}));
  EXPECT_EQ(votes.Best(1, 1).tokens, (Tokens{10}));
}

}  // namespace
}  // namespace nwor
