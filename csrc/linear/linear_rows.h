#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "base/export.h"

// A linear layer for the few rows of a verification step.

namespace nwor {

// input [.., K] times weight [N, K] transposed, plus bias [N]: what torch's linear computes, with
// float32 sums. On the CPU the weights are read once, as they lie, and a row's result does not
// depend on how many rows there are: verifying five tokens gives the bits that five steps of one
// token give. Elsewhere, and for layouts other than contiguous ones, it is torch's own linear.
// Rows of float32 may meet weights of float16 or bfloat16; the result has the rows' type.
//
// Thread-safety: const arguments; runs on torch's threads. Throws Error for wrong shapes and types.
NWOR_EXPORT at::Tensor LinearRows(const at::Tensor& input, const at::Tensor& weight,
                                  const std::optional<at::Tensor>& bias = std::nullopt);

}  // namespace nwor
