#pragma once

#include <cstdint>

#include "tree/fault.h"
#include "tree/tree_params.h"

// What follows from a tree's parents, by one block: a thread per row.

namespace nwor {

constexpr int kChildWords = kMaxTreeRows / 32;

struct TreeShared {
  int32_t parents[kMaxTreeRows];
  uint32_t children[kMaxTreeRows][kChildWords];  // bit j of word w: row 32 * w + j is a child
};

// REQUIRES: blockDim.x >= 32. No barrier is needed before, one is needed after.
__device__ inline void ClearChildren(TreeShared& shared) {
  uint32_t* words = &shared.children[0][0];
  for (int i = threadIdx.x; i < kMaxTreeRows * kChildWords; i += blockDim.x) words[i] = 0;
}

// The lowest set bit at or above `from`, or -1.
__device__ inline int NextChild(const uint32_t* words, int from) {
  for (int word = from / 32; word < kChildWords; ++word) {
    uint32_t bits = words[word];
    if (word == from / 32) bits &= 0xFFFFFFFFu << (from % 32);
    if (bits != 0) return word * 32 + __ffs(static_cast<int>(bits)) - 1;
  }
  return -1;
}

// Writes everything but tokens. shared.parents holds the parents of `used` rows, children are
// cleared; a fault makes a tree of the root alone. All threads call it, blockDim.x >= rows.
__device__ inline void WriteTree(const TreeOutputs& out, TreeShared& shared, int64_t request,
                                 int rows, int used, int32_t prefix_len, int64_t fault) {
  const int row = static_cast<int>(threadIdx.x);
  const bool linked = fault == 0 && row < used;
  const int parent = linked ? shared.parents[row] : -1;
  if (parent >= 0) {
    atomicOr(&shared.children[parent][row / 32], 1u << (row % 32));
  }
  uint64_t mask[kMaxTreeWords] = {};
  int depth = -1;
  for (int at = row; linked && at >= 0; at = shared.parents[at], ++depth) {
#pragma unroll
    for (int word = 0; word < kMaxTreeWords; ++word) {
      mask[word] |= at / 64 == word ? uint64_t{1} << (at % 64) : 0;
    }
  }
  if (!linked) depth = 0;
  __syncthreads();
  if (row == 0) out.status[request] = fault;
  if (row >= rows) return;
  if (fault != 0) {
#pragma unroll
    for (int word = 0; word < kMaxTreeWords; ++word) {
      mask[word] |= row / 64 == word ? uint64_t{1} << (row % 64) : 0;
    }
  }
  const int64_t index = request * rows + row;
  const int words = (rows + 63) / 64;
  out.parents[index] = parent;
  out.depths[index] = depth;
  out.positions[index] = static_cast<int64_t>(prefix_len) + depth;
  out.first_child[index] = linked ? NextChild(shared.children[row], 0) : -1;
  out.next_sibling[index] =
      parent >= 0 && row + 1 < kMaxTreeRows ? NextChild(shared.children[parent], row + 1) : -1;
#pragma unroll
  for (int word = 0; word < kMaxTreeWords; ++word) {
    if (word < words) out.mask[index * words + word] = mask[word];
  }
}

}  // namespace nwor
