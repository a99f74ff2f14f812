#pragma once

#include <array>
#include <cstdint>

#include "base/types.h"

namespace nwor {

// The heads of one projection. `from` is of matrix_dtype, the others are of row_dtype; contiguous.
struct ProjectedHeads {
  const void* from = nullptr;  // [T, heads, dim]
  const void* bias = nullptr;  // [heads, dim] or null
  const void* norm = nullptr;  // [dim] or null: the weight of a root mean square norm of each head
  void* to = nullptr;          // [T, heads, dim]; may be `from`
  int32_t heads = 0;
  bool rotates = false;
};

// What is left to do with queries, keys and values behind their products: bias, norm of each head,
// rotation of its first half against its second. Rounds where torch's operations one by one would.
struct HeadRotationParams {
  std::array<ProjectedHeads, 3> projections;  // those without heads last
  const void* cos = nullptr;                  // [T, dim] of row_dtype, channels contiguous
  const void* sin = nullptr;
  int64_t cos_stride = 0, sin_stride = 0;  // in elements
  int32_t num_rows = 0;                    // times the heads of all projections less than 2^31
  int32_t dim = 0;                         // even
  float epsilon = 0;
  DType row_dtype = DType::kFloat32;
  DType matrix_dtype = DType::kFloat32;
  StreamHandle stream = nullptr;
};

void LaunchHeadRotation(const HeadRotationParams& params);  // CUDA builds only

}  // namespace nwor
