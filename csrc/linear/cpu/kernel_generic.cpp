// Compiler vectors of four floats: every machine, and the check of the other instruction sets.
#define NWOR_SIMD_LEVEL NWOR_SIMD_GENERIC
#include "linear/cpu/kernel.h"

namespace nwor::cpu {

const LinearKernels kGenericLinearKernels = {"generic", simd_generic::kLanes,
                                             &simd_generic::Multiply, &simd_generic::Gate};

}  // namespace nwor::cpu
