#pragma once

#include <cstdint>
#include <limits>

#include "attention/params.h"
#include "base/host_device.h"
#include "base/types.h"

// Parameters of merge_states as kernels take them: no torch, no CUDA. Merges attention states over
// disjoint sets of tokens:
//
//   lse = log(sum_i exp(lse_i)),   out = sum_i exp(lse_i - lse) * out_i
//
// in float, in the order given. A state whose lse is -infinity saw no token: its out is not read.
// Rows for which that holds in every state get zeros and -infinity.

namespace nwor {

inline constexpr int kMaxMergeStates = 32;
// The LSE of a row that saw no token.
inline constexpr float kEmptyLse = -std::numeric_limits<float>::infinity();

struct MergeState {
  const void* out = nullptr;   // [rows, heads, D]
  const float* lse = nullptr;  // [rows, heads]
  RowStrides out_strides;
  RowStrides lse_strides;
  // FlashAttention-2 writes +infinity for rows that saw no token. Otherwise +infinity is an
  // overflow.
  bool infinity_is_empty = false;

  // Converts a stored LSE: -infinity if the row saw no token.
  NWOR_HOST_DEVICE constexpr float LseOf(float given) const {
    return infinity_is_empty && given == -kEmptyLse ? kEmptyLse : given;
  }
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
