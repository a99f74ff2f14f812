#pragma once

#include "attention/cuda/sm80/verify_kernel.cuh"
#include "attention/cuda/sm90/tile_kernel.cuh"
#include "base/check.h"

// The launches of one combination of types and head size. Instantiated once per file in
// instantiations/, which keeps the build parallel.

namespace nwor {

// `early`: the kernel waits itself for the launch ahead of it (bulk::AwaitLaunchAhead).
inline void LaunchKernel(void (*kernel)(VerifyArgs), int threads, bool early,
                         const VerifyArgs& args, const VerifyConfig& config) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, config.smem_bytes);
  if (error == cudaSuccess) {
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t launch = {};
    launch.gridDim = config.num_ctas;
    launch.blockDim = threads;
    launch.dynamicSmemBytes = config.smem_bytes;
    launch.stream = static_cast<cudaStream_t>(args.params.stream);
    launch.attrs = &attribute;
    launch.numAttrs = early ? 1 : 0;
    error = cudaLaunchKernelEx(&launch, kernel, args);
  }
  NWOR_CHECK(error == cudaSuccess, "LaunchVerify: ", cudaGetErrorString(error));
}

template <class Traits>
void LaunchTile(const VerifyArgs& args, const VerifyConfig& config) {
  LaunchKernel(VerifyKernel<Traits>, Traits::kThreads, false, args, config);
}

template <typename T, bool kFloat8, int kHeadDim>
void VerifyLauncher<T, kFloat8, kHeadDim>::Launch(const VerifyArgs& args,
                                                  const VerifyConfig& config) {
  if (config.warpgroup) {
    if constexpr (!kFloat8) {
      const auto launch = [&]<int kGroups, int kHalves>() {
        using Traits = TileTraits<T, kHeadDim, kGroups, kHalves>;
        LaunchKernel(TileKernel<Traits>, TileThreads(kGroups), true, args, config);
      };
      if constexpr (MaxTileGroups(kHeadDim) > 1) {
        if (config.row_tile > kTileRows) return launch.template operator()<2, 2>();
      }
      if constexpr (TileHalves(kHeadDim, 16) == 1) {
        if (TileHalves(kHeadDim, config.row_tile) == 1) return launch.template operator()<1, 1>();
      }
      return launch.template operator()<1, 2>();
    }
  }
  switch (config.row_tile) {
    case 16:
      return LaunchTile<VerifyTraits<T, kFloat8, kHeadDim, 16>>(args, config);
    case 32:
      return LaunchTile<VerifyTraits<T, kFloat8, kHeadDim, 32>>(args, config);
    case 64:
      if constexpr (MaxRowTile(kHeadDim) >= 64) {
        return LaunchTile<VerifyTraits<T, kFloat8, kHeadDim, 64>>(args, config);
      }
  }
  NWOR_CHECK(false, "config.row_tile: got ", config.row_tile, ", expected 16, 32 or ",
             MaxRowTile(kHeadDim));
}

template <typename T, bool kFloat8, int kHeadDim>
bool VerifyLauncher<T, kFloat8, kHeadDim>::HasWarpgroupKernel() {
  if constexpr (kFloat8) {
    return false;
  } else {
    // Built for another target than sm_90a the kernel is empty: it asks for no dynamic shared
    // memory and hardly any registers.
    cudaFuncAttributes attributes;
    const auto kernel = TileKernel<TileTraits<T, kHeadDim, 1, 2>>;
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    return attributes.numRegs > 64;
  }
}

}  // namespace nwor
