#pragma once

#include <cstdint>

#include "base/export.h"
#include "base/types.h"

// The inner loops of linear layers for a few rows and of the gate between two, compiled once per
// instruction set (see attention/simd.h) and chosen at run time.

namespace nwor::cpu {

// out[r][n] = sum over k of x[r][k] * weight[n][k], for outputs first .. last - 1.
struct LinearTask {
  const float* x = nullptr;  // [rows, depth]
  int64_t rows = 0;
  int64_t depth = 0;
  const void* weight = nullptr;  // [outputs, depth]
  DType dtype = DType::kFloat32;
  int64_t first = 0;
  int64_t last = 0;
  float* out = nullptr;  // [rows, out_stride]
  int64_t out_stride = 0;
};

struct LinearKernels {
  const char* name;
  int lanes;
  void (*linear)(const LinearTask&);
  // gate[i] = silu(gate[i]) * up[i]. An element's result depends on its own two values alone.
  void (*gate)(float* gate, const float* up, int64_t count);
};

extern NWOR_EXPORT const LinearKernels kGenericLinearKernels;
#if defined(__aarch64__)
extern NWOR_EXPORT const LinearKernels kNeonLinearKernels;
#elif defined(__x86_64__)
extern NWOR_EXPORT const LinearKernels kAvx2LinearKernels;
extern NWOR_EXPORT const LinearKernels kAvx512LinearKernels;
#endif

// The best this machine has.
NWOR_EXPORT const LinearKernels& ChooseLinearKernels();

}  // namespace nwor::cpu
