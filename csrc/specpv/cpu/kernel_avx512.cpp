#if defined(__x86_64__)

#include "specpv/cpu/kernels.h"

#define NWOR_SIMD_KERNEL "specpv/cpu/kernel.h"
#include "base/simd/simd_avx512.h"

namespace nwor::cpu {

const SpecPVKernels kAvx512SpecPVKernels = {"avx512", simd_avx512::kLanes, &simd_avx512::Extremes,
                                            &simd_avx512::ScoreBlocks};

}  // namespace nwor::cpu

#endif
