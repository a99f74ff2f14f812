#include "tree/tree.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "base/check.h"
#include "tree/acceptance.h"
#include "tree/fault.h"
#include "tree/run_end.h"
#include "tree/tree_params.h"

namespace nwor {
namespace {

at::Tensor Ints(const std::vector<int32_t>& values) {
  return at::tensor(values, at::TensorOptions().dtype(at::kInt));
}
at::Tensor Longs(const std::vector<int64_t>& values) {
  return at::tensor(values, at::TensorOptions().dtype(at::kLong));
}

std::vector<int64_t> List(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kLong).flatten().contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

// The builder's part below the tensors, on memory that is poisoned beforehand.
struct RawTree {
  explicit RawTree(const std::vector<int32_t>& given) : rows(static_cast<int>(given.size())) {
    ParentsParams params;
    params.parents = given.data();
    params.prefix_lens = &prefix_len;
    params.out.parents = parents.data();
    params.out.positions = positions.data();
    params.out.depths = depths.data();
    params.out.mask = mask.data();
    params.out.first_child = first_child.data();
    params.out.next_sibling = next_sibling.data();
    params.out.status = &status;
    params.num_requests = 1;
    params.rows = rows;
    TreeFromParentsCpu(params);
  }
  int rows;
  int32_t prefix_len = 100;
  std::vector<int32_t> parents = std::vector<int32_t>(kMaxTreeRows + 1, 77);
  std::vector<int64_t> positions = std::vector<int64_t>(kMaxTreeRows + 1, 77);
  std::vector<int32_t> depths = std::vector<int32_t>(kMaxTreeRows + 1, 77);
  std::vector<uint64_t> mask = std::vector<uint64_t>(kMaxTreeRows * kMaxTreeWords + 1, 77);
  std::vector<int32_t> first_child = std::vector<int32_t>(kMaxTreeRows + 1, 77);
  std::vector<int32_t> next_sibling = std::vector<int32_t>(kMaxTreeRows + 1, 77);
  int64_t status = 77;
};

TEST(Tree, AChainOfTheLargestSizeSeesAllBefore) {
  std::vector<int32_t> chain(kMaxTreeRows);
  for (int i = 0; i < kMaxTreeRows; ++i) chain[i] = i - 1;
  const RawTree tree(chain);
  EXPECT_EQ(tree.status, 0);
  EXPECT_EQ(tree.depths[255], 255);
  EXPECT_EQ(tree.positions[255], 355);
  for (int word = 0; word < 4; ++word) EXPECT_EQ(tree.mask[255 * 4 + word], ~uint64_t{0});
  EXPECT_EQ(tree.mask[64 * 4 + 1], 1u);
  EXPECT_EQ(tree.mask[64 * 4 + 2], 0u);
  // And not a word beyond.
  EXPECT_EQ(tree.parents[256], 77);
  EXPECT_EQ(tree.mask[256 * 4], 77u);
  EXPECT_EQ(tree.next_sibling[256], 77);
}

TEST(Tree, AnInvalidTreeIsItsRootAlone) {
  const RawTree tree({-1, 0, 3, 2});
  EXPECT_EQ(tree.status, PackFault(TreeFault::kCycle, 2, 3));
  for (int row = 0; row < 4; ++row) {
    EXPECT_EQ(tree.first_child[row], -1);
    EXPECT_EQ(tree.next_sibling[row], -1);
    EXPECT_EQ(tree.mask[row], uint64_t{1} << row);
    EXPECT_EQ(tree.positions[row], 100);
  }
}

TEST(Tree, TheTensorFaceThrowsWithTheRowNamed) {
  try {
    TreeFromParents(Ints({-1, 0, 2, 1}).view({1, 4}), Ints({5}));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("parents[0, 2]: got 2"), std::string::npos)
        << error.what();
  }
}

TEST(Tree, AcceptsWhatTheTargetWants) {
  //        0
  //      1   2        tokens 10 11 12 13 14; the target wants 11, then 13, then 14, then 9
  //      3
  //      4
  const at::Tensor tokens = Longs({10, 11, 12, 13, 14}).view({1, 5});
  const Tree tree = TreeFromParents(Ints({-1, 0, 0, 1, 3}).view({1, 5}), Ints({7}), tokens);
  const at::Tensor targets = Longs({11, 13, 0, 14, 9}).view({1, 5});
  const Accepted accepted = AcceptGreedy(tree.tokens, targets, tree.first_child, tree.next_sibling);
  EXPECT_EQ(List(accepted.path), (std::vector<int64_t>{1, 3, 4, -1, -1}));
  EXPECT_EQ(List(accepted.counts), (std::vector<int64_t>{3}));
  EXPECT_EQ(List(accepted.next_token), (std::vector<int64_t>{9}));
}

TEST(RunEnd, IsTheFirstStopTokenOrTheLastThatHasRoom) {
  const std::vector<int64_t> run = {11, 13, 14, 9}, stops = {14, 13};
  const auto end = [&](const std::vector<int64_t>& stop_ids, int64_t room) {
    const RunEnd found = FindRunEnd(run, stop_ids, room);
    return std::pair(found.num_tokens, found.finish);
  };
  EXPECT_EQ(end({}, INT64_MAX), std::pair(int64_t{4}, FinishReason::kNone));
  EXPECT_EQ(end({}, 5), std::pair(int64_t{4}, FinishReason::kNone));
  EXPECT_EQ(end({}, 4), std::pair(int64_t{4}, FinishReason::kLength));
  EXPECT_EQ(end(stops, 4), std::pair(int64_t{2}, FinishReason::kStop));
  EXPECT_EQ(end(stops, 2), std::pair(int64_t{2}, FinishReason::kStop));  // which is emitted
  EXPECT_EQ(end(stops, 1), std::pair(int64_t{1}, FinishReason::kLength));
  EXPECT_EQ(end(stops, 0), std::pair(int64_t{0}, FinishReason::kLength));
}

}  // namespace
}  // namespace nwor
