#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "attention/cpu/kernels.h"
#include "attention/params.h"

// The mask of a row: which tokens it sees. A row's position is the prefix length plus its depth.
// Under a tree mask the depth is the number of in-flight rows that it sees, less one; without, its
// index in the request. Mask bits beyond the request's rows are ignored.

namespace nwor::cpu {

constexpr uint64_t LowBits(int count) {
  return count >= 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
}

class RowMask {
 public:
  RowMask(const VerifyParams& params, const RowChunk& rows) : params_(params), rows_(rows) {}

  // Bit i: row `row` of the request sees in-flight row first + i, for i < count <= 64, regardless
  // of the window. REQUIRES: first and first + count - 1 share a mask word.
  uint64_t RowBits(int row, int first, int count) const {
    if (params_.tree_mask == nullptr) {
      const int visible = row + 1 - first;
      return visible <= 0 ? 0 : LowBits(visible < count ? visible : count);
    }
    const int64_t mask_row = rows_.request_row + row;
    const uint64_t word = params_.tree_mask[mask_row * params_.mask_words + first / 64];
    return (word >> (first % 64)) & LowBits(count);
  }

  int64_t Position(int row) const {
    const int64_t prefix = params_.prefix_lens[rows_.request];
    if (params_.tree_mask == nullptr) {
      return prefix + row;
    }
    int visible = 0;
    for (int first = 0; first < rows_.request_rows; first += 64) {
      const int left = rows_.request_rows - first;
      visible += std::popcount(RowBits(row, first, left < 64 ? left : 64));
    }
    return prefix + visible - 1;
  }

  // First position that the row sees. Negative if the window begins before the prefix; 0 without a
  // window.
  int64_t VisibleFrom(int row) const {
    return params_.window <= 0 ? 0 : Position(row) - params_.window + 1;
  }

  // First prefix token that some row of the chunk sees. Tokens before it may have any value, and
  // their pages need not exist.
  int64_t FirstVisible() const {
    if (params_.window <= 0) {
      return 0;
    }
    int64_t from = params_.prefix_lens[rows_.request];
    for (int r = 0; r < rows_.count; ++r) {
      from = std::min(from, VisibleFrom(rows_.first + r));
    }
    return std::max<int64_t>(from, 0);
  }

 private:
  const VerifyParams& params_;
  const RowChunk& rows_;
};

}  // namespace nwor::cpu
