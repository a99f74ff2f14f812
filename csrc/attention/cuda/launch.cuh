#pragma once

#include "attention/cuda/sm80/kernel.cuh"
#include "attention/cuda/sm90/kernel.cuh"
#include "base/check.h"

// The launches of one combination of types and head size. Each file in instantiations/ instantiates
// one, which keeps the build parallel; verify.cu picks one at run time.

namespace nwor {

// `dependent`: a programmatic dependent launch; the kernel calls WaitOnDependentGrids.
inline void LaunchKernel(void (*kernel)(VerifyArgs), int threads, bool dependent,
                         const VerifyArgs& args, const VerifyConfig& config) {
  // One bound for all shapes: it belongs to the kernel, and another thread may launch it, too.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           config.max_smem_bytes);
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
    launch.numAttrs = dependent ? 1 : 0;
    error = cudaLaunchKernelEx(&launch, kernel, args);
  }
  NWOR_CHECK(error == cudaSuccess, "LaunchVerify: ", cudaGetErrorString(error));
}

template <class Traits>
void LaunchSm80(const VerifyArgs& args, const VerifyConfig& config) {
  LaunchKernel(sm80::VerifyKernel<Traits>, Traits::kThreads, false, args, config);
}

template <typename T, bool kFloat8, int kHeadDim>
void VerifyLauncher<T, kFloat8, kHeadDim>::Launch(const VerifyArgs& args,
                                                  const VerifyConfig& config) {
  if (config.warpgroup) {
    if constexpr (!kFloat8 || sm90::TakesFloat8(kHeadDim)) {
      const auto launch = [&]<int kWarpgroups, int kHalves>() {
        using Traits = sm90::Traits<T, kFloat8, kHeadDim, kWarpgroups, kHalves>;
        LaunchKernel(sm90::VerifyKernel<Traits>, sm90::CtaThreads(kWarpgroups), true, args, config);
      };
      if constexpr (sm90::MaxConsumerWarpgroups(kHeadDim, kFloat8) > 1) {
        if (config.row_tile > sm90::kWarpgroupRows) return launch.template operator()<2, 2>();
      }
      if constexpr (sm90::RowHalves(kHeadDim, 16) == 1) {
        if (sm90::RowHalves(kHeadDim, config.row_tile) == 1)
          return launch.template operator()<1, 1>();
      }
      return launch.template operator()<1, 2>();
    }
  }
  switch (config.row_tile) {
    case 16:
      return LaunchSm80<sm80::Traits<T, kFloat8, kHeadDim, 16>>(args, config);
    case 32:
      return LaunchSm80<sm80::Traits<T, kFloat8, kHeadDim, 32>>(args, config);
    case 64:
      if constexpr (sm80::MaxRowTile(kHeadDim) >= 64) {
        return LaunchSm80<sm80::Traits<T, kFloat8, kHeadDim, 64>>(args, config);
      }
  }
  NWOR_CHECK(false, "config.row_tile: got ", config.row_tile, ", expected 16, 32 or ",
             sm80::MaxRowTile(kHeadDim));
}

template <typename T, bool kFloat8, int kHeadDim>
bool VerifyLauncher<T, kFloat8, kHeadDim>::HasWarpgroupKernel() {
  if constexpr (kFloat8) {
    return false;
  } else {
    // Built for another target than sm_90a, the kernel is empty and uses hardly any registers.
    cudaFuncAttributes attributes;
    const auto kernel = sm90::VerifyKernel<sm90::Traits<T, false, kHeadDim, 1, 2>>;
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    return attributes.numRegs > 64;
  }
}

}  // namespace nwor
