#if defined(__x86_64__)

#include "specpv/cpu/kernels.h"

#define NWOR_SIMD_KERNEL "specpv/cpu/kernel.h"
#include "base/simd/simd_avx2.h"

namespace nwor::cpu {

const SpecPVKernels kAvx2SpecPVKernels = {"avx2", simd_avx2::kLanes, &simd_avx2::Extremes,
                                          &simd_avx2::ScoreBlocks};

}  // namespace nwor::cpu

#endif
