#pragma once

#include <cstdint>
#include <vector>

#include "base/export.h"

// A draft tree of one request as it travels: tokens and parents, on the host.

namespace nwor {

inline constexpr int64_t kMaxTreeRows = 256;

// Row 0 is the root, the last emitted token; parents[0] = -1, and every parent comes before its
// child. Without parents: a chain.
struct NWOR_EXPORT DraftTree {
  std::vector<int64_t> tokens;   // [R]
  std::vector<int32_t> parents;  // [R] or empty

  int64_t num_rows() const { return static_cast<int64_t>(tokens.size()); }
  int64_t num_drafts() const { return num_rows() - 1; }
  int32_t parent(int64_t row) const {
    return parents.empty() ? static_cast<int32_t>(row) - 1 : parents[row];
  }

  // Throws Error naming the row that is wrong.
  void Validate(int64_t most_rows = kMaxTreeRows) const;

  // The rest REQUIRES a valid tree.
  bool is_chain() const;
  std::vector<int32_t> Depths() const;  // [R]; the root's is 0
  int32_t Depth() const;                // the largest of them
  // The rows of at most this depth, in their order; the root always.
  DraftTree Pruned(int64_t depth) const;
};

}  // namespace nwor
