#if defined(__aarch64__)

#define NWOR_SIMD_LEVEL NWOR_SIMD_NEON
#include "linear/cpu/kernel.h"

namespace nwor::cpu {

const LinearKernels kNeonLinearKernels = {"neon", simd_neon::kLanes, &simd_neon::Multiply,
                                          &simd_neon::Gate};

}  // namespace nwor::cpu

#endif
