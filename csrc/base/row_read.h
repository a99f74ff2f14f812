#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/fp8.h"
#include "base/types.h"

// How one head of a row is read out of a cache on the host: copied, or converted to another dtype.

namespace nwor {

template <typename Out>
void ReadHeadAs(const void* from, DType from_dtype, void* to, int dim, float scale) {
  const auto convert = [&](auto value_at) {
    for (int i = 0; i < dim; ++i) static_cast<Out*>(to)[i] = static_cast<Out>(value_at(i) * scale);
  };
  switch (from_dtype) {
    case DType::kFloat32:
      return convert([&](int i) { return static_cast<const float*>(from)[i]; });
    case DType::kFloat16:
      return convert([&](int i) -> float { return static_cast<const c10::Half*>(from)[i]; });
    case DType::kBFloat16:
      return convert([&](int i) -> float { return static_cast<const c10::BFloat16*>(from)[i]; });
    case DType::kFloat8E4M3:
      return convert([&](int i) { return DequantizeE4M3(static_cast<const uint8_t*>(from)[i]); });
  }
}

// `scale` counts where dtypes differ: only float8 has one. REQUIRES: to_dtype is not float8.
inline void ReadHead(const void* from, DType from_dtype, void* to, DType to_dtype, int dim,
                     float scale) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(dim) * ElementBytes(to_dtype));
    return;
  }
  switch (to_dtype) {
    case DType::kFloat16:
      return ReadHeadAs<c10::Half>(from, from_dtype, to, dim, scale);
    case DType::kBFloat16:
      return ReadHeadAs<c10::BFloat16>(from, from_dtype, to, dim, scale);
    default:
      return ReadHeadAs<float>(from, from_dtype, to, dim, scale);
  }
}

// The scale of a head: none, one for all, or one each.
inline float ScaleOfHead(const float* scales, int count, int head) {
  return scales == nullptr ? 1.0f : scales[count == 1 ? 0 : head];
}

}  // namespace nwor
