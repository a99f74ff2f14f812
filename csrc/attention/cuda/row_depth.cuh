#pragma once

#include <cstdint>

#include "attention/params.h"

namespace nwor {

// The depth of a row in its request's tree: the number of rows it sees besides itself, which is its
// distance from the end of the prefix; -1: it does not even see itself. Mask bits beyond the
// request's rows are ignored. Plan: RowRange or WorkTile.
template <class Plan>
__device__ int RowDepth(const VerifyParams& p, const Plan& plan, int row) {
  if (p.tree_mask == nullptr) return row;
  const uint64_t* mask = p.tree_mask + int64_t{plan.query_start + row} * p.mask_words;
  int visible = 0;
#pragma unroll 1
  for (int first = 0; first < plan.request_rows; first += 64) {
    const int rows = plan.request_rows - first;
    const uint64_t in_request = rows >= 64 ? ~0ull : (1ull << rows) - 1;
    visible += __popcll(mask[first / 64] & in_request);
  }
  return visible - 1;
}

}  // namespace nwor
