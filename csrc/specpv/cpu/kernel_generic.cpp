// Compiler vectors of four floats: every machine, and the check of the other instruction sets.
#define NWOR_SIMD_LEVEL NWOR_SIMD_GENERIC
#include "specpv/cpu/kernel.h"

namespace nwor::cpu {

const SpecPVKernels kGenericSpecPVKernels = {"generic", simd_generic::kLanes,
                                             &simd_generic::Extremes, &simd_generic::ScoreBlocks};

}  // namespace nwor::cpu
