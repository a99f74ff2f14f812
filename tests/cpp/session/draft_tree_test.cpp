#include "session/draft_tree.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "test_seed.h"

namespace nwor {
namespace {

// The tokens from the root to a row.
std::vector<int64_t> PathTo(const DraftTree& tree, int64_t row) {
  std::vector<int64_t> path = row == 0 ? std::vector<int64_t>() : PathTo(tree, tree.parent(row));
  path.push_back(tree.tokens[row]);
  return path;
}

std::vector<std::vector<int64_t>> Paths(const DraftTree& tree, size_t longest) {
  std::vector<std::vector<int64_t>> paths;
  for (int64_t row = 0; row < tree.num_rows(); ++row) {
    paths.push_back(PathTo(tree, row));
    if (paths.back().size() > longest) paths.pop_back();
  }
  return paths;
}

TEST(DraftTree, PruningKeepsThePathsOfThatDepthInTheirOrder) {
  const uint64_t seed = TestSeed();
  std::mt19937 random(seed);
  for (int repeat = 0; repeat < 200; ++repeat) {
    DraftTree tree{{7}, {-1}};
    for (int64_t row = 1, rows = 1 + random() % 20; row < rows; ++row) {
      tree.tokens.push_back(static_cast<int64_t>(random() % 5));
      tree.parents.push_back(static_cast<int32_t>(random() % row));
    }
    for (int64_t depth = 0; depth < 6; ++depth) {
      const DraftTree pruned = tree.Pruned(depth);
      pruned.Validate();
      EXPECT_LE(pruned.Depth(), depth);
      EXPECT_EQ(Paths(pruned, tree.tokens.size()), Paths(tree, depth + 1)) << "depth " << depth;
    }
  }
}

TEST(DraftTree, PruningCutsAChainWithoutParents) {
  const DraftTree pruned = DraftTree{{1, 2, 3, 4}, {}}.Pruned(2);
  EXPECT_EQ(pruned.tokens, (std::vector<int64_t>{1, 2, 3}));
  EXPECT_TRUE(pruned.is_chain());
}

TEST(DraftTree, PruningToNothingLeavesTheRoot) {
  for (const int64_t depth : {int64_t{0}, int64_t{-3}}) {
    const DraftTree pruned = DraftTree{{1, 2}, {-1, 0}}.Pruned(depth);
    EXPECT_EQ(pruned.tokens, (std::vector<int64_t>{1}));
    EXPECT_EQ(pruned.parent(0), -1);
  }
}

}  // namespace
}  // namespace nwor
