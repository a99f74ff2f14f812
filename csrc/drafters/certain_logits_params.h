#pragma once

#include <cstdint>

#include "base/types.h"

namespace nwor {

// What a token's logit is that has no chance. Finite: softmax stays free of NaN.
constexpr float kNoChance = -1e30f;

struct CertainLogitsParams {
  float* logits = nullptr;  // [num_rows, drafts, vocabulary]
  int64_t row_stride = 0;
  int64_t draft_stride = 0;
  int32_t num_rows = 0;
  int32_t drafts = 0;
  int64_t vocabulary = 0;
  const int32_t* rows = nullptr;    // [num_requests]
  const int32_t* starts = nullptr;  // [num_requests]
  const int64_t* tokens = nullptr;  // [num_requests, drafts], token_stride apart
  int64_t token_stride = 0;
  int32_t num_requests = 0;
  StreamHandle stream = nullptr;
};

void LaunchCertainLogits(const CertainLogitsParams& params);  // CUDA builds only

}  // namespace nwor
