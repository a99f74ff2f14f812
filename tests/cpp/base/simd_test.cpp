// The compiler's default level: NEON on aarch64.
#define NWOR_SIMD_SUITE Simd
#include "base/simd_cases.h"
