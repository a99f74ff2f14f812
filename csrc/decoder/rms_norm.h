#pragma once

#include <cstdint>

#include "base/types.h"

namespace nwor {

// Rows divided by their root mean square, times a weight; of a sum where a product is given, which
// is then stored too. As torch's operations one by one round in the rows' type: the product (with
// its bias), the sum, the quotient, the result. Rows and weight of row_dtype; product and normed of
// matrix_dtype: the same, or narrower than float32 rows. All but `rows` contiguous, none of the
// outputs is an input.
struct RmsNormParams {
  const void* rows = nullptr;     // [T, parts * part_size], channels contiguous
  const void* product = nullptr;  // [T, parts * part_size] or null
  const void* bias = nullptr;     // [parts * part_size] or null: added to the product
  void* sums = nullptr;           // [T, parts * part_size], with a product only
  const void* weight = nullptr;   // [parts, part_size]
  void* normed = nullptr;         // [T, parts * part_size]
  int64_t row_stride = 0;         // of `rows`, in elements
  int64_t num_rows = 0;
  int32_t parts = 1;  // each normalized alone
  int32_t part_size = 0;
  float epsilon = 0;
  DType row_dtype = DType::kFloat32;
  DType matrix_dtype = DType::kFloat32;
  StreamHandle stream = nullptr;
};

void LaunchRmsNorm(const RmsNormParams& params);  // CUDA builds only

}  // namespace nwor
