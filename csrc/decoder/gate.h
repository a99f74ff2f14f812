#pragma once

#include <cstdint>

#include "base/types.h"

namespace nwor {

// gate = SiLU(gate) * up, both of matrix_dtype and contiguous. Factor and product are rounded to
// row_dtype, as torch's operations one by one would.
struct GateParams {
  void* gate = nullptr;      // [count]
  const void* up = nullptr;  // [count]
  int64_t count = 0;
  DType row_dtype = DType::kFloat32;
  DType matrix_dtype = DType::kFloat32;
  StreamHandle stream = nullptr;
};

void LaunchGate(const GateParams& params);  // CUDA builds only

}  // namespace nwor
