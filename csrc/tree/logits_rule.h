#pragma once

#include <cmath>
#include <cstdint>

#include "base/host_device.h"
#include "tree/logits_params.h"

// What CPU and CUDA share of target_probs: one request's numbers, and one token's logit.

namespace nwor {

struct RowOptions {
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float repetition = 1.0f;
  float frequency = 0.0f;
  float presence = 0.0f;
  bool penalised = false;
};

NWOR_HOST_DEVICE inline RowOptions OptionsOf(const SamplingOptions& all, int64_t request) {
  RowOptions row;
  if (all.temperature != nullptr) row.temperature = all.temperature[request];
  if (all.top_k != nullptr) row.top_k = all.top_k[request];
  if (all.top_p != nullptr) row.top_p = all.top_p[request];
  if (all.min_p != nullptr) row.min_p = all.min_p[request];
  if (all.repetition_penalty != nullptr) row.repetition = all.repetition_penalty[request];
  if (all.frequency_penalty != nullptr) row.frequency = all.frequency_penalty[request];
  if (all.presence_penalty != nullptr) row.presence = all.presence_penalty[request];
  row.penalised = row.repetition != 1.0f || row.frequency != 0.0f || row.presence != 0.0f;
  return row;
}

// 0, or which number is out of range: 1 temperature .. 7 presence, as in kSamplingOptionNames.
NWOR_HOST_DEVICE inline int WrongOption(const RowOptions& row) {
  const float kMax = 3.402823466e38f;  // the largest finite one
  if (!(row.temperature >= 0.0f && row.temperature <= kMax)) return 1;
  if (row.top_k < 0) return 2;
  if (!(row.top_p > 0.0f && row.top_p <= 1.0f)) return 3;
  if (!(row.min_p >= 0.0f && row.min_p <= 1.0f)) return 4;
  if (!(row.repetition > 0.0f && row.repetition <= kMax)) return 5;
  if (!(row.frequency >= -kMax && row.frequency <= kMax)) return 6;
  if (!(row.presence >= -kMax && row.presence <= kMax)) return 7;
  return 0;
}

// `count`: how often the token was emitted, drafts above the row included.
NWOR_HOST_DEVICE inline float Penalise(float logit, const RowOptions& row, int64_t count,
                                       bool in_prompt) {
  if (count > 0 || in_prompt) {
    logit = logit > 0.0f ? logit / row.repetition : logit * row.repetition;
  }
  if (count > 0) {
    logit -= row.frequency * static_cast<float>(count);
    logit -= row.presence;
  }
  return logit;
}

// Unsigned integers in the order of floats.
NWOR_HOST_DEVICE inline uint32_t OrderedBits(uint32_t bits) {
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

}  // namespace nwor
