#define NWOR_SIMD_LEVEL NWOR_SIMD_GENERIC
#define NWOR_SIMD_SUITE SimdGeneric
#include "attention/simd_cases.h"
