#pragma once

#include <cstdint>

#include "attention/params.h"

namespace nwor {

// Rows that a row of the plan's request sees besides itself: its depth in the tree, its distance
// behind the prefix; -1: it sees not even itself. Bits of rows that the request does not have mean
// nothing.
template <class Plan>
__device__ int RowDepth(const VerifyParams& p, const Plan& plan, int row) {
  if (p.tree_mask == nullptr) return row;
  const uint64_t* mask = p.tree_mask + int64_t{plan.query_start + row} * p.mask_words;
  int visible = 0;
#pragma unroll 1
  for (int first = 0; first < plan.request_rows; first += 64) {
    const int rows = plan.request_rows - first;
    const uint64_t meant = rows >= 64 ? ~0ull : (1ull << rows) - 1;
    visible += __popcll(mask[first / 64] & meant);
  }
  return visible - 1;
}

}  // namespace nwor
