#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "base/cuda/launch_check.h"
#include "base/types.h"

// Programmatic dependent launch (PDL): a kernel may start while the previous one on the stream
// still runs, so that a chain of short kernels does not pay for every start. sm_90 and up;
// elsewhere these are ordinary launches. The names follow cutlass::arch::wait_on_dependent_grids.

namespace nwor {

// Waits for the previous launch. Before it, a kernel must not touch what the previous launch writes
// or reads, nor, unless those launches are known to be past their own WaitOnDependentGrids, what
// earlier ones do. Every thread block calls it before it ends; otherwise the end of this launch
// would not imply the end of those before it.
__device__ inline void WaitOnDependentGrids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next launch start as soon as all thread blocks are here. Called after
// WaitOnDependentGrids.
__device__ inline void LaunchDependentGrids() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Whether WaitOnDependentGrids in this kernel waits: code built for sm_80 also runs on later
// devices.
inline bool SupportsDependentLaunch(const void* kernel) {
  cudaFuncAttributes attributes;
  CheckCuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
  return attributes.ptxVersion >= 90;
}

// REQUIRES: `kernel` calls WaitOnDependentGrids. Legal while the stream is being captured.
template <typename Params>
void LaunchDependent(void (*kernel)(Params), dim3 grid, int threads, size_t shared_bytes,
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
  launch.numAttrs = SupportsDependentLaunch(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
  CheckCuda(cudaLaunchKernelEx(&launch, kernel, params), what);
}

}  // namespace nwor
