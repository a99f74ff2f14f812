#include "specpv/cpu/kernels.h"

namespace nwor::cpu {

const SpecPVKernels& ChooseSpecPVKernels() {
#if defined(__aarch64__)
  return kNeonSpecPVKernels;
#elif defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return kAvx512SpecPVKernels;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return kAvx2SpecPVKernels;
  }
  return kGenericSpecPVKernels;
#else
  return kGenericSpecPVKernels;
#endif
}

}  // namespace nwor::cpu
