#if defined(__x86_64__)

#include "attention/cpu/block_mask.h"
#include "attention/cpu/kernels.h"
#include "attention/cpu/prefix_reader.h"
#include "attention/cpu/row_mask.h"

#define NWOR_SIMD_KERNEL "attention/cpu/kernel.h"
#include "base/simd/simd_avx2.h"

namespace nwor::cpu {

const Kernels kAvx2Kernels = {"avx2",
                              simd_avx2::kLanes,
                              false,
                              &simd_avx2::PackQueries,
                              &simd_avx2::Attend,
                              &simd_avx2::Merge,
                              &simd_avx2::Finish};

}  // namespace nwor::cpu

#endif
