#pragma once

#include <cstdint>

#include "base/host_device.h"

// The tail of compact views (contiguous copies of what partial steps attend to) that a commit feeds
// in its own launch: an accepted row goes to the paged cache and to the view, or to neither. Plain
// data: what the views are for is not this folder's business.
//
// Cache, staged rows and views have one dtype. Row 0 of a request is in the cache already and is
// read from there.

namespace nwor {

struct CommitTail {
  void* keys = nullptr;    // [layers, B, Hkv, N, D], layers as the commit's; null: none
  void* values = nullptr;  // likewise, with the same strides; channels are contiguous
  int64_t layer_stride = 0, request_stride = 0, head_stride = 0, token_stride = 0;  // in elements
  const int32_t* begin = nullptr;       // [B] where request b's rows begin in its view, -1: not fed
  const int64_t* root_slots = nullptr;  // [B] cache slot of row 0, -1: none
  int32_t* held = nullptr;              // [B] tokens the view has afterwards
  int32_t capacity = 0;                 // N

  // Where the first accepted row goes. REQUIRES: begin[b] >= 0.
  NWOR_HOST_DEVICE int64_t FirstRow(int32_t b) const {
    return int64_t{begin[b]} + (root_slots[b] >= 0 ? 1 : 0);
  }
};

}  // namespace nwor
