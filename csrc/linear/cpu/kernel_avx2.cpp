#if defined(__x86_64__)

#include "linear/cpu/kernels.h"

#define NWOR_SIMD_KERNEL "linear/cpu/kernel.h"
#include "base/simd/simd_avx2.h"

namespace nwor::cpu {

const LinearKernels kAvx2LinearKernels = {"avx2", simd_avx2::kLanes, &simd_avx2::Multiply,
                                          &simd_avx2::Gate};

}  // namespace nwor::cpu

#endif
