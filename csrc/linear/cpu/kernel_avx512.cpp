#if defined(__x86_64__)

#include "linear/cpu/kernels.h"

#define NWOR_SIMD_KERNEL "linear/cpu/kernel.h"
#include "base/simd/simd_avx512.h"

namespace nwor::cpu {

const LinearKernels kAvx512LinearKernels = {"avx512", simd_avx512::kLanes, &simd_avx512::Multiply,
                                            &simd_avx512::Gate};

}  // namespace nwor::cpu

#endif
