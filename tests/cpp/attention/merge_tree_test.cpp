#include "attention/cpu/merge_tree.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace nwor::cpu {
namespace {

// States that hold an index into a list of texts; merging writes down which were merged.
std::vector<std::string>* texts = nullptr;

void MergeTexts(const State& into, const State& from, int, int) {
  std::string& text = (*texts)[static_cast<size_t>(into.max[0])];
  text = "(" + text + (*texts)[static_cast<size_t>(from.max[0])] + ")";
}

const Kernels kTextKernels = {"text", 1, false, nullptr, nullptr, &MergeTexts, nullptr};

// The tree over `count` splits if work tiles of `run` splits are merged first, each by its own
// MergeTree.
std::string TreeOf(int count, int run) {
  std::vector<float> indices(count);
  std::vector<std::string> labels(count);
  texts = &labels;
  for (int i = 0; i < count; ++i) {
    indices[i] = static_cast<float>(i);
    labels[i] = static_cast<char>('a' + i % 26);
  }
  MergeTree work_tiles(kTextKernels, 1, 1);
  for (int begin = 0; begin < count; begin += run) {
    MergeTree splits(kTextKernels, 1, 1);
    for (int i = begin; i < std::min(count, begin + run); ++i) {
      splits.Push({&indices[i], nullptr, nullptr});
    }
    work_tiles.Push(splits.Reduce());
  }
  return labels[static_cast<size_t>(work_tiles.Reduce().max[0])];
}

TEST(MergeTree, MergesEqualNeighboursFirst) {
  EXPECT_EQ(TreeOf(1, 1), "a");
  EXPECT_EQ(TreeOf(4, 1), "((ab)(cd))");
  EXPECT_EQ(TreeOf(7, 1), "(((ab)(cd))((ef)g))");
}

TEST(MergeTree, TheTreeDoesNotDependOnTheRunsOfSplits) {
  for (int count = 1; count <= 40; ++count) {
    const std::string expected = TreeOf(count, 1);
    for (int run = 2; run <= 64; run *= 2) EXPECT_EQ(TreeOf(count, run), expected) << count;
  }
}

TEST(MergeTree, HoldsLogarithmicallyManyStates) {
  std::vector<std::string> labels(1);
  texts = &labels;
  float index = 0;
  MergeTree merge_tree(kTextKernels, 1, 1);
  int deepest = 0;
  for (int i = 0; i < 4096; ++i) {
    labels[0].clear();
    merge_tree.Push({&index, nullptr, nullptr});
    deepest = std::max(deepest, merge_tree.depth());
  }
  EXPECT_LE(deepest, 13);
}

}  // namespace
}  // namespace nwor::cpu
