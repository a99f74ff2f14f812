#pragma once

#include <ATen/core/Tensor.h>

#include "base/export.h"

// What verify_attention and merge_rows ask alike of their arguments.

namespace nwor {

// Throws unless every element of `out` has a place of its own.
NWOR_EXPORT void CheckOnePlacePerElement(const at::Tensor& out);

// Whether two tensors have memory in common, as far as their strides tell: false when their bytes
// lie apart, or when some stride keeps them apart, as it does slices of one buffer's rows. Tensors
// that are interleaved otherwise count as overlapping.
NWOR_EXPORT bool MayOverlap(const at::Tensor& a, const at::Tensor& b);

// Whether each element of `a` lies where the same one of `b` does.
NWOR_EXPORT bool AreSamePlaces(const at::Tensor& a, const at::Tensor& b);

// What kernels compute with.
struct LogitScalars {
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
};

// Throws where float32 will not do: scales beyond 1e30, softcaps other than 0 below 1e-6, and above
// 1000, where the rounding of tanh would move logits by more than 1e-4.
NWOR_EXPORT LogitScalars CheckLogitScalars(double scale, double softcap);

}  // namespace nwor
