#pragma once

#include <cuda_runtime_api.h>

#include "base/check.h"

// Kernel launches of this library: what a launch needs to know of its device, and errors as
// nwor::Error. Both are legal while a stream is being captured.

namespace nwor {

inline void CheckCuda(cudaError_t error, const char* what) {
  NWOR_CHECK(error == cudaSuccess, what, ": got CUDA error ", static_cast<int>(error), " (",
             cudaGetErrorString(error), "), expected success");
}

inline int CurrentDeviceAttribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  CheckCuda(cudaGetDevice(&device), "cudaGetDevice");
  CheckCuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace nwor
