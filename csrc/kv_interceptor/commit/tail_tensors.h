#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "base/export.h"
#include "kv_interceptor/commit/commit.h"

namespace nwor {

// Compact views that a commit feeds in its own launch, see commit/tail.h.
struct TailTensors {
  at::Tensor keys, values;  // [L, B, Hkv, N, D] of the staged rows' dtype; undefined: none
  at::Tensor begin;         // [B] int32: where the step's rows begin in each view, -1: not fed
  at::Tensor root_slots;    // [B] int64: cache slot of each request's row 0, -1: none
  at::Tensor held;          // [B] int32: becomes the tokens that each view has
};

// Checks them against a commit of num_requests requests whose layers and first group are described.
// No memory is named for tensors that carry shapes only. Throws Error.
NWOR_EXPORT CommitTail DescribeTail(const TailTensors& tensors, const CommitParams& params,
                                    int64_t num_requests, at::Device device);

}  // namespace nwor
