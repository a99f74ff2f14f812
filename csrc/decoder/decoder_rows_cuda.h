#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "decoder/decoder_rows.h"

// Both halves of a layer on CUDA: torch's products, and a kernel of ours for what stands between
// two of them. Layouts are free; what kernels cannot read as it lies is copied. On the current
// stream, capturable. CUDA builds only.

namespace nwor {

// REQUIRES: arguments as AttentionInputs has checked them, on CUDA, rows of float32, float16 or
// bfloat16; nothing empty; rows times heads less than 2^31.
std::array<at::Tensor, 3> AttentionInputsOnCuda(const at::Tensor& hidden,
                                                const AttentionInputWeights& weights,
                                                const at::Tensor& cos, const at::Tensor& sin);

// REQUIRES: the same of LayerOutput.
at::Tensor LayerOutputOnCuda(const at::Tensor& hidden, const at::Tensor& attended,
                             const LayerOutputWeights& weights);

}  // namespace nwor
