#include "drafters/ngram_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "base/check.h"
#include "drafters/vote_tree.h"
#include "test_seed.h"

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

// Every place of the text but its end, the longest match first, the latest of equals.
Tokens SlowLookup(const Tokens& text, const Tokens& drafts, int64_t count,
                  const NgramOptions& options) {
  Tokens all = text;
  all.insert(all.end(), drafts.begin(), drafts.end());
  const auto size = static_cast<int64_t>(text.size());
  for (int64_t length = options.max_tokens; length >= options.min_tokens; --length) {
    if (static_cast<int64_t>(all.size()) < length) continue;
    for (int64_t end = size - 1; end >= length; --end) {
      if (std::equal(all.end() - length, all.end(), text.begin() + end - length)) {
        return {text.begin() + end, text.begin() + std::min(size, end + count)};
      }
    }
  }
  return {};
}

TEST(NgramIndex, LooksUpWhatAScanFinds) {
  const uint64_t seed = TestSeed();
  std::mt19937_64 random(seed);
  for (int run = 0; run < 40; ++run) {
    const NgramOptions options{1 + static_cast<int64_t>(random() % 2), 4, 8};
    const uint64_t words = std::vector<uint64_t>{1, 3, 8, 30}[random() % 4];
    const auto draw = [&](uint64_t most) {
      Tokens tokens(random() % most);
      for (int64_t& token : tokens) token = static_cast<int64_t>(random() % words);
      return tokens;
    };
    NgramIndex index(options);
    Tokens text;
    for (int step = 0; step < 30; ++step) {
      const Tokens more = draw(step == 0 ? 600 : 6);
      index.Append(more);
      text.insert(text.end(), more.begin(), more.end());
      if (random() % 8 == 0) {
        text.resize(random() % (text.size() + 1));
        index.Truncate(static_cast<int64_t>(text.size()));
      }
      const Tokens drafts = draw(5);
      const auto count = static_cast<int64_t>(random() % 5);
      ASSERT_EQ(index.Lookup(drafts, count), SlowLookup(text, drafts, count, options));
      ASSERT_EQ(index.size(), static_cast<int64_t>(text.size()));
      if (!text.empty()) {
        ASSERT_EQ(index.last(), text.back());
      }
    }
  }
}

TEST(NgramIndex, ForgetsWhatIsTakenBack) {
  const uint64_t seed = TestSeed();
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
  EXPECT_THROW(index.last(), Error);
  EXPECT_THROW(index.Lookup({}, -1), Error);
  EXPECT_EQ(index.Lookup({1, 2}, 3), Tokens{});
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
