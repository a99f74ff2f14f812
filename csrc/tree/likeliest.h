#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "base/export.h"

namespace nwor {

struct Likeliest {
  at::Tensor tokens;     // [.., count] int64, the likeliest first
  at::Tensor log_probs;  // [.., count] float32
};

// The `count` likeliest tokens of each row of logits [.., V] (float32, float16 or bfloat16), the
// lower id first of equal logits, and their log-probabilities. A logit that is no finite number
// counts as -infinite: its probability is 0. A row gives the same bits in every batch.
//
// Thread-safe. CPU or CUDA (current stream, one launch, capturable, no host sync). Rows that do not
// lie side by side are read where they are; the tokens of a row that are not, are copied.
NWOR_EXPORT Likeliest LikeliestTokens(const at::Tensor& logits, int64_t count);

}  // namespace nwor
