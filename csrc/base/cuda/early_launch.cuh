#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "base/cuda/launch_check.h"
#include "base/types.h"

// Launches that may begin while the one ahead of them on the stream still runs, so that a chain of
// short kernels does not pay for every start. sm_90 and up; elsewhere they are ordinary launches.

namespace nwor {

// Until here nothing may be touched that the launch ahead writes or reads, and, unless that is
// known to be behind its own AwaitLaunchAhead, nothing of those before it. Every thread block
// passes it before it ends, or the end of this launch would not mean the end of those before it.
__device__ inline void AwaitLaunchAhead() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Behind AwaitLaunchAhead: the next launch may begin, as soon as all thread blocks are here.
__device__ inline void LetNextBegin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether AwaitLaunchAhead in this kernel waits: code made for sm_80 runs on later devices, too.
inline bool WaitsForLaunchAhead(const void* kernel) {
  cudaFuncAttributes attributes;
  CheckCuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  return attributes.ptxVersion >= 90;
}

// REQUIRES: `kernel` calls AwaitLaunchAhead. Legal while the stream is being captured.
template <typename Params>
void LaunchEarly(void (*kernel)(Params), dim3 grid, int threads, size_t shared_bytes,
                 const Params& params, const char* what) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launch = {};
  launch.gridDim = grid;
  launch.blockDim = dim3(static_cast<unsigned>(threads));
  launch.dynamicSmemBytes = shared_bytes;
  launch.stream = static_cast<cudaStream_t>(params.stream);
  launch.attrs = &attribute;
  launch.numAttrs = WaitsForLaunchAhead(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
  CheckCuda(cudaLaunchKernelEx(&launch, kernel, params), what);
}

}  // namespace nwor
