#if defined(__aarch64__)

#define NWOR_SIMD_LEVEL NWOR_SIMD_NEON
#include "specpv/cpu/kernel.h"

namespace nwor::cpu {

const SpecPVKernels kNeonSpecPVKernels = {"neon", simd_neon::kLanes, &simd_neon::Extremes,
                                          &simd_neon::ScoreBlocks};

}  // namespace nwor::cpu

#endif
