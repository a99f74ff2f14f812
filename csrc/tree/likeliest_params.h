#pragma once

#include <cstdint>

#include "base/types.h"

// The likeliest tokens of rows of logits, as kernels take it: no torch, no CUDA.

namespace nwor {

inline constexpr int kMaxLikeliest = 32;

struct LikeliestParams {
  const void* logits = nullptr;  // [R, V], tokens side by side
  DType dtype = DType::kFloat32;
  int64_t row_stride = 0;
  int64_t* tokens = nullptr;   // [R, count]
  float* log_probs = nullptr;  // [R, count]
  int64_t num_rows = 0;
  int32_t vocabulary = 0;
  int32_t count = 0;  // 1 .. kMaxLikeliest, at most the vocabulary
  StreamHandle stream = nullptr;
};

// One launch on params.stream; capturable. Defined in builds with CUDA.
void LaunchLikeliest(const LikeliestParams& params);

// The same on host memory, on torch's threads.
void LikeliestCpu(const LikeliestParams& params);

}  // namespace nwor
