#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "base/export.h"
#include "specpv/view_gather_params.h"

// Compact views: the tokens of partial views copied out of the paged cache into contiguous memory.

namespace nwor {

// For request b, tokens held[b] .. lens[b] - 1 of its view go to keys, values, then held[b] is
// lens[b]. lens[b] -1: the request is left alone.
//   key_caches, value_caches  L x [P, S, Hkv, D], in the views' memory or in pinned host memory
//   blocks [L, B, Hkv, max_blocks] int32, as a PartialView's   lens, held [B] int32
//   keys, values [L, B, Hkv, N, D] of the caches' dtype, contiguous channels, the same strides
// On the CPU a length or block out of range throws Error and nothing is written. On CUDA it makes
// lens[b] -1, so that the request sees its whole prefix; nothing is read by the host, capturable.
NWOR_EXPORT void GatherView(const std::vector<at::Tensor>& key_caches,
                            const std::vector<at::Tensor>& value_caches, const at::Tensor& blocks,
                            at::Tensor lens, at::Tensor held, at::Tensor keys, at::Tensor values,
                            int64_t block_size);

// A paged cache for views to be gathered from, in pinned host memory that the device reads and
// writes in place (specpv_offload): sizes and dtype as given, on `device`. On the CPU it is
// ordinary memory. Throws Error when there is not enough.
NWOR_EXPORT at::Tensor PinnedCache(at::IntArrayRef sizes, at::ScalarType dtype, at::Device device);

}  // namespace nwor
