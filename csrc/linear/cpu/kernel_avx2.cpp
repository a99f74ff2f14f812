#if defined(__x86_64__)

// Everything below the pragma is compiled for avx2; headers shared with other files come before it.
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "linear/cpu/kernels.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

#define NWOR_SIMD_LEVEL NWOR_SIMD_AVX2
#include "linear/cpu/kernel.h"

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace nwor::cpu {

const LinearKernels kAvx2LinearKernels = {"avx2", simd_avx2::kLanes, &simd_avx2::Multiply};

}  // namespace nwor::cpu

#endif
