#if defined(__x86_64__)

// Everything below the pragma is compiled for avx512; headers shared with other files come before
// it.
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "linear/cpu/kernels.h"

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define NWOR_SIMD_LEVEL NWOR_SIMD_AVX512
#include "linear/cpu/kernel.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace nwor::cpu {

const LinearKernels kAvx512LinearKernels = {"avx512", simd_avx512::kLanes, &simd_avx512::Multiply};

}  // namespace nwor::cpu

#endif
