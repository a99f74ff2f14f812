#pragma once

#include "attention/verify_kernel.cuh"
#include "check.h"

namespace nwor {

// Launches the kernel of config.row_tile. Instantiated once per file in instantiations/.
template <typename T, bool kFloat8, int kHeadDim>
void LaunchVerifyTyped(const VerifyArgs& args, const VerifyConfig& config);

template <class Traits>
void LaunchVerifyTile(const VerifyArgs& args, const VerifyConfig& config) {
  const auto kernel = VerifyKernel<Traits>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.smem_bytes);
  if (error == cudaSuccess) {
    const auto stream = static_cast<cudaStream_t>(args.params.stream);
    kernel<<<config.num_ctas, Traits::kThreads, config.smem_bytes, stream>>>(args);
    error = cudaGetLastError();
  }
  NWOR_CHECK(error == cudaSuccess, "LaunchVerify: ", cudaGetErrorString(error));
}

template <typename T, bool kFloat8, int kHeadDim>
void LaunchVerifyTyped(const VerifyArgs& args, const VerifyConfig& config) {
  switch (config.row_tile) {
    case 16:
      return LaunchVerifyTile<VerifyTraits<T, kFloat8, kHeadDim, 16>>(args, config);
    case 32:
      return LaunchVerifyTile<VerifyTraits<T, kFloat8, kHeadDim, 32>>(args, config);
    case 64:
      if constexpr (MaxRowTile(kHeadDim) >= 64) {
        return LaunchVerifyTile<VerifyTraits<T, kFloat8, kHeadDim, 64>>(args, config);
      }
  }
  NWOR_CHECK(false, "config.row_tile: got ", config.row_tile, ", expected 16, 32 or ",
             MaxRowTile(kHeadDim));
}

}  // namespace nwor
