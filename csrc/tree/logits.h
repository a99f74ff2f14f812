#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "base/export.h"

namespace nwor {

// What of a request's sampling is not neutral; see logits_params.h for meanings and order. Options
// are [B]: float32, top_k int32 or int64.
struct TargetProbsArguments {
  at::Tensor logits;                             // [B, R, V] float32, float16 or bfloat16
  std::optional<at::Tensor> temperature;         // [B], >= 0; 0 = greedy
  std::optional<at::Tensor> top_k;               // [B], >= 0; 0 = all
  std::optional<at::Tensor> top_p;               // [B], (0, 1]
  std::optional<at::Tensor> min_p;               // [B], [0, 1]
  std::optional<at::Tensor> repetition_penalty;  // [B], > 0
  std::optional<at::Tensor> frequency_penalty;   // [B]
  std::optional<at::Tensor> presence_penalty;    // [B]
  std::optional<at::Tensor> output_counts;       // [B, V] int32: how often emitted, root included
  std::optional<at::Tensor> prompt_mask;         // [B, V] bool: in the prompt
  std::optional<at::Tensor> tokens;              // [B, R]: drafts above a row count as emitted
  std::optional<at::Tensor> parents;             // [B, R], with tokens
  std::optional<at::Tensor> bitmask;             // [B, R, ceil(V / 32)] int32, bit set = allowed
  std::optional<at::Tensor> status;              // [B] int64
};

// The probabilities that acceptance takes, float32 [B, R, V].
//
// Thread-safe. CPU or CUDA (current stream, one launch, capturable, no host sync). On the CPU an
// option out of range, a NaN or +infinite logit, or a row without any possible token throws
// nwor::Error; on CUDA such a row is all zeros, which acceptance refuses, and status says why.
NWOR_EXPORT at::Tensor TargetProbs(const TargetProbsArguments& arguments);

}  // namespace nwor
