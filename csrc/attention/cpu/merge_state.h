#pragma once

#include <cmath>
#include <cstdint>

#include "attention/cpu/kernels.h"
#include "attention/cpu/tile.h"
#include "base/simd/simd.h"

// Merges two states, and normalises the last one into output and LSE. Compiled once per instruction
// set, see kernel.h.

namespace nwor::NWOR_SIMD_NAMESPACE {

void Merge(const cpu::State& into, const cpu::State& from, int tiles, int head_dim) {
  for (int i = 0; i < tiles * kTileRows; ++i) {
    const float max = from.max[i] > into.max[i] ? from.max[i] : into.max[i];
    const float base = max == kMinusInfinity ? 0.0f : max;
    const Vec kept = Exp2(Broadcast(into.max[i] - base));
    const Vec added = Exp2(Broadcast(from.max[i] - base));
    into.max[i] = max;
    into.sum[i] = into.sum[i] * kept[0] + from.sum[i] * added[0];
    float* to = into.acc + static_cast<int64_t>(i) * head_dim;
    const float* other = from.acc + static_cast<int64_t>(i) * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) {
      Store(to + d, Fma(Load(other + d), added, Load(to + d) * kept));
    }
  }
}

template <typename T>
void FinishAs(const VerifyParams& params, const cpu::RowChunk& rows, const cpu::State& state) {
  const int head_dim = params.head_dim;
  const int head_rows = rows.head_tiles() * kTileRows;
  for (int i = 0; i < rows.num_heads * head_rows; ++i) {
    const int packed = i % head_rows;
    if (packed >= rows.packed()) {
      continue;
    }
    const int64_t row = rows.request_row + rows.first + packed / rows.group;
    const int64_t head = (rows.first_head + i / head_rows) * rows.group + packed % rows.group;
    const float sum = state.sum[i];
    const bool saw_nothing = state.max[i] == kMinusInfinity && sum == 0.0f;
    const Vec inverse = Broadcast(saw_nothing ? 0.0f : 1.0f / sum);
    const float* acc = state.acc + static_cast<int64_t>(i) * head_dim;
    T* out =
        static_cast<T*>(params.out) + row * params.out_strides.row + head * params.out_strides.head;
    for (int d = 0; d < head_dim; d += kLanes) {
      StoreAs(out + d, Load(acc + d) * inverse);
    }
    if (params.lse != nullptr) {
      params.lse[row * params.num_heads + head] =
          saw_nothing ? kMinusInfinity : state.max[i] / kLog2E + std::log(sum);
    }
  }
}

void Finish(const VerifyParams& params, const cpu::RowChunk& rows, const cpu::State& state) {
  switch (params.dtype) {
    case DType::kFloat16:
      return FinishAs<Half>(params, rows, state);
    case DType::kBFloat16:
      return FinishAs<BFloat16>(params, rows, state);
    default:
      return FinishAs<float>(params, rows, state);
  }
}

}  // namespace nwor::NWOR_SIMD_NAMESPACE
