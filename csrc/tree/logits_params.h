#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "base/types.h"

// From the target's logits to the probabilities acceptance takes, as kernels take it: no torch, no
// CUDA. In this order, each on what the one before left:
//
//   1 penalties     repetition, then frequency and presence, over the tokens the row has seen
//   2 bitmask       tokens whose bit is not set are impossible
//   3 temperature   0 = all mass on the largest logit (the lowest id of equals); ends here
//   4 top-k         the k largest, and what equals the k-th
//   5 top-p         the fewest largest whose mass is at least p, and what equals the last
//   6 min-p         what is at least min_p times as probable as the most probable
//   7 normalised

namespace nwor {

// One value per request, null: as if the neutral one were given everywhere.
struct SamplingOptions {
  const float* temperature = nullptr;         // >= 0; neutral 1
  const int32_t* top_k = nullptr;             // 0 or at least the vocabulary: all
  const float* top_p = nullptr;               // (0, 1]; neutral 1
  const float* min_p = nullptr;               // [0, 1]; neutral 0
  const float* repetition_penalty = nullptr;  // > 0; neutral 1
  const float* frequency_penalty = nullptr;   // neutral 0
  const float* presence_penalty = nullptr;    // neutral 0
};

// In the order above; entry i is what a fault's value of i + 1 names.
inline constexpr std::array<std::string_view, 7> kSamplingOptionNames = {
    "temperature",       "top_k",           "top_p", "min_p", "repetition_penalty",
    "frequency_penalty", "presence_penalty"};

struct LogitsParams {
  const void* logits = nullptr;  // [B, R, V]
  DType dtype = DType::kFloat32;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t token_stride = 1;
  SamplingOptions options;
  const int32_t* output_counts = nullptr;  // [B, V] how often each token was emitted, or null
  const uint8_t* prompt_mask = nullptr;    // [B, V] 1 = in the prompt, or null
  const int64_t* tokens = nullptr;         // [B, R] or null: drafts above a row count as emitted
  const int32_t* parents = nullptr;        // [B, R] with tokens
  const int32_t* bitmask = nullptr;        // rows of ceil(V / 32) words, or null
  int64_t bitmask_batch = 0;
  int64_t bitmask_row = 0;
  float* out = nullptr;       // [B, R, V]
  int64_t* status = nullptr;  // [B], cleared, or null; a row with a fault is all zeros
  int32_t num_requests = 0;
  int32_t rows = 0;
  int32_t vocabulary = 0;
  StreamHandle stream = nullptr;
};

// One launch on params.stream; capturable. Defined in builds with CUDA.
void LaunchTargetProbs(const LogitsParams& params);

// The same on host memory, on torch's threads. Faults are in status, which must be there.
void TargetProbsCpu(const LogitsParams& params);

}  // namespace nwor
