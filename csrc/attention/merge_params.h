#pragma once

#include <cstdint>

#include "attention/params.h"
#include "types.h"

// Merging attention states over disjoint sets of tokens, as kernels take it: no torch, no CUDA.
//
//   lse = log(sum_i exp(lse_i)),   out = sum_i exp(lse_i - lse) * out_i
//
// in float, in the order given. A state whose lse is -infinity saw nothing: its out is not read.
// Rows that no state saw get zeros and -infinity.

namespace nwor {

inline constexpr int kMaxMergeStates = 32;

struct MergeState {
  const void* out = nullptr;   // [rows, heads, D]
  const float* lse = nullptr;  // [rows, heads]
  RowStrides out_strides;
  RowStrides lse_strides;
};

struct MergeParams {
  MergeState states[kMaxMergeStates];
  int32_t num_states = 0;
  void* out = nullptr;   // [rows, heads, D], contiguous channels
  float* lse = nullptr;  // [rows, heads] contiguous, or null
  RowStrides out_strides;
  int32_t num_rows = 0;
  int32_t num_heads = 0;
  int32_t head_dim = 0;
  DType state_dtype = DType::kBFloat16;  // of the states' out
  DType out_dtype = DType::kBFloat16;    // of the result
  StreamHandle stream = nullptr;
};

// One launch on params.stream; capturable. Defined in builds with CUDA.
void LaunchMergeStates(const MergeParams& params);

}  // namespace nwor
