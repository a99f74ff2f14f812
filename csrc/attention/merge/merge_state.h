#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "attention/merge/merge_state_params.h"
#include "base/export.h"

namespace nwor {

// Merges N >= 1 attention states over disjoint sets of tokens: outs [rows, heads, D] of one dtype,
// lses [rows, heads] float32 (natural log). Returns out in the states' dtype, and lse. Sums are
// float, in the order given; more than 32 states are merged in groups whose results stay float.
// Thread-safe; CPU, or CUDA on the current stream. Throws nwor::Error on wrong shapes, dtypes or
// devices.
NWOR_EXPORT std::pair<at::Tensor, at::Tensor> MergeStates(const std::vector<at::Tensor>& outs,
                                                          const std::vector<at::Tensor>& lses);

// The same into tensors that the caller has allocated; lse may be undefined. In the first
// `num_flash` states an LSE of +infinity also means that a row saw no token, as FlashAttention-2
// writes it. REQUIRES: num_flash == 0, or at most 32 states.
NWOR_EXPORT void MergeStatesInto(const std::vector<at::Tensor>& outs,
                                 const std::vector<at::Tensor>& lses, const at::Tensor& out,
                                 const at::Tensor& lse, size_t num_flash = 0);

// The CPU implementation. REQUIRES: host memory, 1 <= num_states <= kMaxMergeStates.
NWOR_EXPORT void MergeStatesCpu(const MergeParams& params);

}  // namespace nwor
