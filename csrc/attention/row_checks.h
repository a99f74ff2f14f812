#pragma once

#include <ATen/core/Tensor.h>

#include "base/export.h"

// Argument checks that verify_attention and merge_rows share. Thread-safe.

namespace nwor {

// Throws nwor::Error if two elements of `out` share memory.
NWOR_EXPORT void CheckNoSelfOverlap(const at::Tensor& out);

// Whether two tensors may share memory, as far as their strides tell. False if their byte ranges
// are disjoint, or if some stride keeps them apart, as for slices of the rows of one buffer.
// Tensors that are interleaved in other ways count as overlapping.
NWOR_EXPORT bool MayOverlap(const at::Tensor& a, const at::Tensor& b);

// Whether `a` and `b` are the same memory: each element of `a` has the address of that of `b`.
NWOR_EXPORT bool IsSameMemory(const at::Tensor& a, const at::Tensor& b);

// Scale and softcap as kernels take them.
struct LogitScalars {
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
};

// Throws nwor::Error for values that float32 cannot handle: |scale| above 1e30, softcap below 1e-6
// (other than 0) or above 1000, where the rounding of tanh would change logits by more than 1e-4.
NWOR_EXPORT LogitScalars CheckLogitScalars(double scale, double softcap);

}  // namespace nwor
