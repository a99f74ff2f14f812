#pragma once

#include <cstdint>
#include <limits>

#include "base/host_device.h"
#include "base/reason_table.h"

// What a tree, or an acceptance over one, found wrong on the device, where nothing can be thrown.
// One 64-bit status word per request, 0 = fine. Plain data without torch: kernels include it.

// X(enumerator, label, sentence)
#define NWOR_TREE_FAULTS(X)                                                              \
  X(kNone, "ok", "no fault")                                                             \
  X(kRootParent, "root_parent", "row 0 is the root: its parent must be -1")              \
  X(kSecondRoot, "second_root", "a row other than the first has no parent")              \
  X(kParentRange, "parent_range", "a parent is not a row of the tree")                   \
  X(kForwardParent, "forward_parent", "a parent does not come before its child")         \
  X(kCycle, "cycle", "a row is its own ancestor")                                        \
  X(kRowCount, "row_count", "a request has no row, or more rows than the tree")          \
  X(kKeptRange, "kept_range", "a kept parent is not a candidate of the step before")     \
  X(kScore, "score", "a score is NaN")                                                   \
  X(kLink, "link", "a child or sibling link does not lead forward to a row")             \
  X(kToken, "token", "a token id is outside the vocabulary")                             \
  X(kProbability, "probability", "a probability is negative, NaN or above one")          \
  X(kProbabilitySum, "probability_sum", "the probabilities of a row do not sum to one")  \
  X(kCoin, "coin", "a coin is outside [0, 1]")                                           \
  X(kParameter, "parameter", "a sampling parameter is out of range")                     \
  X(kLogits, "logits", "a row has a NaN, an infinite logit, or no token left to choose") \
  X(kPrefixLen, "prefix_len", "a prefix length is negative or too large")                \
  X(kSharedRow, "shared_row", "more than one link leads to a row")                       \
  X(kDraftSum, "draft_sum", "the draft probabilities of a row do not sum to one")

namespace nwor {

NWOR_REASON_TABLE(TreeFault, int32_t, NWOR_TREE_FAULTS)

// bits 0..7 the fault, 8..31 the row (of the tree), 32..63 the offending value as 32 bits.
NWOR_HOST_DEVICE constexpr int64_t PackFault(TreeFault fault, int32_t row, int32_t value) {
  return static_cast<int64_t>(static_cast<uint64_t>(fault) |
                              (static_cast<uint64_t>(row) & 0xFFFFFFu) << 8 |
                              static_cast<uint64_t>(static_cast<uint32_t>(value)) << 32);
}

// The nearest number of 32 bits: one that is wrong stays wrong.
NWOR_HOST_DEVICE constexpr int32_t Saturate(int64_t value) {
  constexpr int64_t kLeast = std::numeric_limits<int32_t>::min();
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  return static_cast<int32_t>(value < kLeast ? kLeast : value > kMost ? kMost : value);
}

// The largest of 32 bits stands for all that are larger.
inline constexpr int32_t kMaxPrefixLen = std::numeric_limits<int32_t>::max() - 1;

// 0, or what is wrong with a prefix length.
NWOR_HOST_DEVICE constexpr int64_t PrefixFault(int32_t prefix_len) {
  return prefix_len >= 0 && prefix_len <= kMaxPrefixLen
             ? 0
             : PackFault(TreeFault::kPrefixLen, 0, prefix_len);
}

}  // namespace nwor
