#define NWOR_SIMD_LEVEL NWOR_SIMD_GENERIC
#define NWOR_SIMD_SUITE SimdGeneric
#include "base/simd_cases.h"
