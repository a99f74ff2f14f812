#pragma once

// The CPU attention itself, once per instruction set: kernel_<set>.cpp chooses the level of simd.h,
// includes this file and lists its functions in a cpu::Kernels (task.h).

#include "attention/cpu/query_pack.h"       // PackQueries
#include "attention/cpu/range_attention.h"  // Attend
#include "attention/cpu/state_result.h"     // Merge, Finish
