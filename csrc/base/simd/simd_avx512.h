// Compiles the header NWOR_SIMD_KERNEL for AVX-512, whatever the compiler's default. Headers that
// other files share must be included before: otherwise their inline functions would be compiled for
// AVX-512 and used by those files too. Includers bring their own; those of the standard library
// that the kernels use are here.
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__clang__)
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif

#define NWOR_SIMD_LEVEL NWOR_SIMD_AVX512
#include NWOR_SIMD_KERNEL

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
