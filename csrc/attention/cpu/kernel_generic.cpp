// Compiler vectors of four floats: for every machine, and as a reference for the other instruction
// sets.
#define NWOR_SIMD_LEVEL NWOR_SIMD_GENERIC
#include "attention/cpu/kernel.h"

namespace nwor::cpu {

const Kernels kGenericKernels = {"generic",
                                 simd_generic::kLanes,
                                 false,
                                 &simd_generic::PackQueries,
                                 &simd_generic::Attend,
                                 &simd_generic::Merge,
                                 &simd_generic::Finish};

}  // namespace nwor::cpu
