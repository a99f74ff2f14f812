#if defined(__x86_64__)

#include "attention/cpu/block_cover.h"
#include "attention/cpu/matrix_unit.h"
#include "attention/cpu/prefix_reader.h"
#include "attention/cpu/task.h"
#include "attention/cpu/visibility.h"

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
                             &simd_avx512::AttendWithMatrixUnit,
                             &simd_avx512::Merge,
                             &simd_avx512::Finish};

}  // namespace nwor::cpu

#endif
