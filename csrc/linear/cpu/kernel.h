#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/simd/simd.h"
#include "linear/cpu/kernels.h"

// A few rows times a weight matrix as it lies in memory, once per instruction set: kernel_<set>.cpp
// chooses the level of simd.h and includes this file.
//
// Every output has one chain of accumulators over the depth and one way of adding their lanes,
// whatever tile it is in: a row's result does not depend on the rows beside it.

namespace nwor::NWOR_SIMD_NAMESPACE {

using cpu::LinearTask;

// Outputs of a tile of so many rows: as many accumulators as GCC keeps in registers.
template <int kRows>
constexpr int TileOutputs() {
#if NWOR_SIMD_LEVEL == NWOR_SIMD_NEON || NWOR_SIMD_LEVEL == NWOR_SIMD_AVX512
  return kRows <= 2 ? 8 : kRows <= 4 ? 5 : 4;
#else
  return kRows <= 2 ? 4 : 2;
#endif
}

template <typename T>
NWOR_SIMD_INLINE Vec LoadFirst(const T* p, int64_t count) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, static_cast<size_t>(count) * sizeof(T));
  return LoadAs(padded);
}

// Without the pragmas GCC keeps the accumulators in memory from one step of the depth to the next.
#define NWOR_UNROLL _Pragma("GCC unroll 8")

template <typename Weight, int kRows, int kOutputs>
NWOR_SIMD_INLINE void MultiplyTile(const LinearTask& task, int64_t row, int64_t output) {
  const int64_t depth = task.depth, whole = depth / kLanes * kLanes;
  const float* x[kRows];
  const Weight* weight[kOutputs];
  Vec sums[kRows][kOutputs];
  NWOR_UNROLL for (int r = 0; r < kRows; ++r) x[r] = task.x + (row + r) * depth;
  NWOR_UNROLL for (int n = 0; n < kOutputs; ++n) {
    weight[n] = static_cast<const Weight*>(task.weight) + (output + n) * depth;
    NWOR_UNROLL for (int r = 0; r < kRows; ++r) sums[r][n] = Vec{};
  }
  for (int64_t k = 0; k < whole; k += kLanes) {
    Vec rows[kRows];
    NWOR_UNROLL for (int r = 0; r < kRows; ++r) rows[r] = Load(x[r] + k);
    NWOR_UNROLL for (int n = 0; n < kOutputs; ++n) {
      const Vec w = LoadAs(weight[n] + k);
      NWOR_UNROLL for (int r = 0; r < kRows; ++r) sums[r][n] = Fma(w, rows[r], sums[r][n]);
    }
  }
  if (const int64_t rest = depth - whole; rest > 0) {
    NWOR_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec last = LoadFirst(x[r] + whole, rest);
      NWOR_UNROLL for (int n = 0; n < kOutputs; ++n) {
        sums[r][n] = Fma(LoadFirst(weight[n] + whole, rest), last, sums[r][n]);
      }
    }
  }
  const Vec none{};
  NWOR_UNROLL for (int r = 0; r < kRows; ++r) {
    float* out = task.out + (row + r) * task.out_stride + output;
    NWOR_UNROLL for (int n = 0; n < kOutputs; n += 4) {
      const Quad quad = SumLanes(sums[r][n], n + 1 < kOutputs ? sums[r][n + 1] : none,
                                 n + 2 < kOutputs ? sums[r][n + 2] : none,
                                 n + 3 < kOutputs ? sums[r][n + 3] : none);
      NWOR_UNROLL for (int i = 0; i < 4; ++i) {
        if (n + i < kOutputs) out[n + i] = quad[i];
      }
    }
  }
}

#undef NWOR_UNROLL

template <typename Weight, int kOutputs, int kRows>
NWOR_SIMD_INLINE void MultiplyOutputs(const LinearTask& task, int64_t row, int64_t first,
                                      int64_t last) {
  int64_t n = first;
  for (; n + kOutputs <= last; n += kOutputs) MultiplyTile<Weight, kRows, kOutputs>(task, row, n);
  for (; n < last; ++n) MultiplyTile<Weight, kRows, 1>(task, row, n);
}

// Rows of the next tile: four, or what leaves no small rest.
inline int64_t NextRows(int64_t left) {
  if (left <= 5) return left;
  if (left == 6) return 3;
  return left % 4 == 2 ? 5 : 4;
}

// All rows of a strip of outputs, which stays in the cache from the first rows to the last.
template <typename Weight>
void MultiplyStrip(const LinearTask& task, int64_t first, int64_t last) {
  for (int64_t row = 0, rows = 0; row < task.rows; row += rows) {
    rows = NextRows(task.rows - row);
    switch (rows) {
      case 1:
        MultiplyOutputs<Weight, TileOutputs<1>(), 1>(task, row, first, last);
        break;
      case 2:
        MultiplyOutputs<Weight, TileOutputs<2>(), 2>(task, row, first, last);
        break;
      case 3:
        MultiplyOutputs<Weight, TileOutputs<3>(), 3>(task, row, first, last);
        break;
      case 4:
        MultiplyOutputs<Weight, TileOutputs<4>(), 4>(task, row, first, last);
        break;
      default:
        MultiplyOutputs<Weight, TileOutputs<5>(), 5>(task, row, first, last);
    }
  }
}

template <typename Weight>
void MultiplyAll(const LinearTask& task) {
  constexpr int64_t kStrip = 40;  // a multiple of every tile's outputs
  for (int64_t n = task.first; n < task.last; n += kStrip) {
    MultiplyStrip<Weight>(task, n, std::min(n + kStrip, task.last));
  }
}

// silu(gate) * up. Below -88, where 1 + exp(-gate) is more than Exp2 can tell, it is infinite: such
// gates give nothing, and the infinite one gives NaN, as torch has it.
NWOR_SIMD_INLINE Vec Gated(Vec gate, Vec up) {
  constexpr float kLog2E = 1.4426950408889634f;
  const Vec power = gate * -kLog2E;
  const Vec infinite = Broadcast(std::numeric_limits<float>::infinity());
  return gate / (power > 127.0f ? infinite : 1.0f + Exp2(power)) * up;
}

inline void Gate(float* gate, const float* up, int64_t count) {
  const int64_t whole = count / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) Store(gate + i, Gated(Load(gate + i), Load(up + i)));
  if (const int64_t rest = count - whole; rest > 0) {
    float last[kLanes];
    Store(last, Gated(LoadFirst(gate + whole, rest), LoadFirst(up + whole, rest)));
    std::memcpy(gate + whole, last, static_cast<size_t>(rest) * sizeof(float));
  }
}

inline void Multiply(const LinearTask& task) {
  switch (task.dtype) {
    case DType::kFloat16:
      return MultiplyAll<Half>(task);
    case DType::kBFloat16:
      return MultiplyAll<BFloat16>(task);
    default:
      return MultiplyAll<float>(task);
  }
}

}  // namespace nwor::NWOR_SIMD_NAMESPACE
