#include "linear/cpu/kernels.h"

namespace nwor::cpu {

const LinearKernels& ChooseLinearKernels() {
#if defined(__aarch64__)
  return kNeonLinearKernels;
#elif defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return kAvx512LinearKernels;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    return kAvx2LinearKernels;
  }
  return kGenericLinearKernels;
#else
  return kGenericLinearKernels;
#endif
}

}  // namespace nwor::cpu
