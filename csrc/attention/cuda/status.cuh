#pragma once

#include "attention/cuda/verify.h"

namespace nwor {

// Records an error unless there is one already. status may be null.
__device__ inline void ReportError(int64_t* status, VerifyStatus code, int64_t request,
                                   int64_t value) {
  if (status == nullptr) return;
  const unsigned long long before = atomicCAS(reinterpret_cast<unsigned long long*>(status), 0ull,
                                              static_cast<unsigned long long>(code));
  if (before == 0) {
    status[1] = request;
    status[2] = value;
  }
}

}  // namespace nwor
