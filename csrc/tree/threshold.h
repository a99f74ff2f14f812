#pragma once

#include <cstdint>

#include "base/host_device.h"

// The search for a threshold among keys: the largest key such that all keys of at least it weigh
// enough. Each pass over the keys counts what is at or above a few pivots; no atomics, no sorting,
// and sums of integers, so that any order of adding gives the same.

namespace nwor {

struct ThresholdSearch {
  static constexpr int kPivots = 7;

  uint32_t lo;  // what is at or above it weighs enough
  uint32_t hi;  // what is at or above it does not

  NWOR_HOST_DEVICE uint32_t Pivot(int i) const {
    return lo + static_cast<uint32_t>(static_cast<uint64_t>(hi - lo) * (i + 1) / (kPivots + 1));
  }

  // Takes the weights at or above each pivot, and the smallest and largest key in [lo, hi) (in
  // wrong order: there is none). True: lo is the threshold.
  NWOR_HOST_DEVICE bool Narrow(const uint64_t (&weights)[kPivots], uint64_t needed,
                               uint32_t smallest, uint32_t largest) {
    if (smallest > largest) return true;
    uint32_t below = lo;
    uint32_t above = hi;
    for (int i = kPivots - 1; i >= 0; --i) {
      if (weights[i] >= needed) {
        below = Pivot(i);
        break;
      }
      above = Pivot(i);
    }
    lo = below > smallest ? below : smallest;
    hi = above <= largest ? above : largest + 1;
    return hi - lo <= 1;
  }
};

}  // namespace nwor
