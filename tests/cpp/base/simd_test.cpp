// The compiler's default level: NEON on aarch64.
#define NWOR_SIMD_SUITE Simd
#include "attention/simd_cases.h"
