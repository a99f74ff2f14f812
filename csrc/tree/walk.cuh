#pragma once

#include <cstdint>

#include "tree/acceptance_params.h"
#include "tree/fault.h"
#include "tree/tree_params.h"

// One request's tree in shared memory, a thread per row, for the kernels that walk down it.

namespace nwor {

struct WalkShared {
  int64_t tokens[kMaxTreeRows];
  int32_t first[kMaxTreeRows];
  int32_t next[kMaxTreeRows];
  int32_t choice[kMaxTreeRows];  // accepted child, -1 = none, below = a fault
  int32_t path[kMaxTreeRows];
  int32_t incoming[kMaxTreeRows];  // links that lead to each row
  int32_t count;
  int32_t last_row;
  int32_t first_wrong;  // row of the first link that leads nowhere, or that several lead to
  int64_t fault;
};

__device__ inline bool LeadsForward(int link, int row, int rows) {
  return link == -1 || (link > row && link < rows);
}

// Loads tokens and links; a chain's are made up. Links that lead backwards or out of the tree are a
// fault, so every walk over them ends; as are two to one row, so every row has one parent at most.
// Ends with a barrier. REQUIRES: blockDim.x >= rows.
__device__ inline void LoadLinks(const int64_t* tokens, const TreeLinks& links, int64_t request,
                                 int rows, WalkShared& shared) {
  const int row = static_cast<int>(threadIdx.x);
  if (row == 0) {
    shared.first_wrong = rows;
    shared.fault = 0;
  }
  int first = -1, next = -1;
  int drafts = rows - 1;
  if (row < rows) {
    shared.tokens[row] = tokens[request * rows + row];
    if (links.first_child != nullptr) {
      first = links.first_child[request * rows + row];
      next = links.next_sibling[request * rows + row];
    } else {
      if (links.num_drafts != nullptr) drafts = links.num_drafts[request];
      first = row < drafts ? row + 1 : -1;
    }
    shared.first[row] = first;
    shared.next[row] = next;
    shared.path[row] = -1;
    shared.incoming[row] = 0;
  }
  __syncthreads();
  if (drafts < 0 || drafts >= rows) {
    if (row == 0) shared.fault = PackFault(TreeFault::kRowCount, 0, drafts);
  } else if (row < rows && !(LeadsForward(first, row, rows) && LeadsForward(next, row, rows))) {
    atomicMin(&shared.first_wrong, row);
  } else if (row < rows) {
    if (first >= 0) atomicAdd(&shared.incoming[first], 1);
    if (next >= 0) atomicAdd(&shared.incoming[next], 1);
  }
  __syncthreads();
  if (row == 0 && shared.first_wrong < rows) {
    const int wrong = shared.first_wrong;
    const int link =
        LeadsForward(shared.first[wrong], wrong, rows) ? shared.next[wrong] : shared.first[wrong];
    shared.fault = PackFault(TreeFault::kLink, wrong, link);
  }
  __syncthreads();
  if (shared.fault != 0) return;
  if (row < rows && shared.incoming[row] > 1) atomicMin(&shared.first_wrong, row);
  __syncthreads();
  if (row == 0 && shared.first_wrong < rows) {
    const int wrong = shared.first_wrong;
    shared.fault = PackFault(TreeFault::kSharedRow, wrong, shared.incoming[wrong]);
  }
  __syncthreads();
}

// Follows shared.choice from the root. One thread calls it.
__device__ inline void FollowChoices(WalkShared& shared) {
  int row = 0, count = 0;
  while (shared.choice[row] >= 0) {
    row = shared.choice[row];
    shared.path[count++] = row;
  }
  shared.count = count;
  shared.last_row = row;
}

// Writes path, count and status; after a fault, those of a request that accepts nothing. All
// threads call it after a barrier.
__device__ inline void WriteWalk(const AcceptOutputs& out, const WalkShared& shared,
                                 int64_t request, int rows) {
  const int row = static_cast<int>(threadIdx.x);
  const bool fine = shared.fault == 0;
  if (row < rows) out.path[request * rows + row] = fine ? shared.path[row] : -1;
  if (row == 0) {
    out.counts[request] = fine ? shared.count : 0;
    if (out.status != nullptr) out.status[request] = shared.fault;
    if (!fine) out.next_token[request] = -1;
  }
}

}  // namespace nwor
