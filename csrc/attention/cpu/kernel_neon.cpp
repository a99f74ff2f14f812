#if defined(__aarch64__)

#define NWOR_SIMD_LEVEL NWOR_SIMD_NEON
#include "attention/cpu/kernel.h"

namespace nwor::cpu {

const Kernels kNeonKernels = {"neon",
                              simd_neon::kLanes,
                              false,
                              &simd_neon::PackQueries,
                              &simd_neon::Attend,
                              &simd_neon::Merge,
                              &simd_neon::Finish};

}  // namespace nwor::cpu

#endif
