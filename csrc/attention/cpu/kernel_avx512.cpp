#if defined(__x86_64__)

#include "attention/cpu/amx.h"
#include "attention/cpu/block_mask.h"
#include "attention/cpu/kernels.h"
#include "attention/cpu/prefix_reader.h"
#include "attention/cpu/row_mask.h"

#define NWOR_SIMD_KERNEL "attention/cpu/kernel.h"
#include "base/simd/simd_avx512.h"

namespace nwor::cpu {

const Kernels kAvx512Kernels = {"avx512",
                                simd_avx512::kLanes,
                                false,
                                &simd_avx512::PackQueries,
                                &simd_avx512::Attend,
                                &simd_avx512::Merge,
                                &simd_avx512::Finish};

const Kernels kAmxKernels = {"amx",
                             simd_avx512::kLanes,
                             true,
                             &simd_avx512::PackQueriesAndPairs,
                             &simd_avx512::AttendWithAmx,
                             &simd_avx512::Merge,
                             &simd_avx512::Finish};

}  // namespace nwor::cpu

#endif
