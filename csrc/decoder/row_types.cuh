#pragma once

#include <type_traits>
#include <utility>

#include "base/cuda/element.cuh"
#include "base/types.h"

// The types of a decoder layer's rows and of its matrices, and the roundings between operations
// that torch would have made one by one.

namespace nwor {

inline constexpr int kRowVector = 8;  // channels: 16 bytes of float16 or bfloat16

// Calls `body` with null pointers of both types: one and the same, or float32 rows with matrices of
// half their size. REQUIRES: such a pair.
template <typename Body>
void WithRowTypes(DType rows, DType matrices, Body&& body) {
  WithElementType(rows, [&](auto* row) {
    using Row = std::remove_pointer_t<decltype(row)>;
    WithElementType(matrices, [&](auto* matrix) {
      using Matrix = std::remove_pointer_t<decltype(matrix)>;
      constexpr bool kKnown = !std::is_same_v<Row, E4M3> && !std::is_same_v<Matrix, E4M3>;
      if constexpr (kKnown && (std::is_same_v<Row, Matrix> || std::is_same_v<Row, float>)) {
        body(row, matrix);
      }
    });
  });
}

template <typename T>
__device__ float Rounded(float x) {
  T stored;
  StoreElement(&stored, x);
  return ElementToFloat(stored);
}

// REQUIRES: `from` and `to` aligned to packets of kVector elements.
template <int kVector, typename T>
__device__ void LoadChannels(const T* from, float* values) {
  const auto packet = *reinterpret_cast<const Packet<T, kVector>*>(from);
#pragma unroll
  for (int j = 0; j < kVector; ++j) values[j] = ElementToFloat(packet.element[j]);
}

template <int kVector, typename T>
__device__ void StoreChannels(T* to, const float* values) {
  Packet<T, kVector> packet;
#pragma unroll
  for (int j = 0; j < kVector; ++j) StoreElement(&packet.element[j], values[j]);
  *reinterpret_cast<Packet<T, kVector>*>(to) = packet;
}

}  // namespace nwor
