#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "base/cache_layout.h"
#include "base/types.h"

// How a kernel moves a row: in which vectors, copied or quantised. Plain host functions, so that
// the choice is tested without a GPU.

namespace nwor {

// kCopyN: N bytes at a time. kQuantizeTxN: N channels of T become N bytes of float8 e4m3.
enum class RowOp : int32_t {
  kCopy16,
  kCopy8,
  kCopy4,
  kCopy2,
  kQuantizeHalfx8,
  kQuantizeBFloat16x8,
  kQuantizeFloatx8,
  kQuantizeHalfx1,
  kQuantizeBFloat16x1,
  kQuantizeFloatx1,
};

// Bytes of the row that one vector takes, and bytes of the cache that it fills.
struct RowVectorBytes {
  int32_t row;
  int32_t cache;
};

constexpr RowVectorBytes VectorBytes(RowOp op) {
  constexpr std::array<RowVectorBytes, 10> kBytes = {
      {{16, 16}, {8, 8}, {4, 4}, {2, 2}, {16, 8}, {16, 8}, {32, 8}, {2, 1}, {2, 1}, {4, 1}}};
  return kBytes[static_cast<size_t>(op)];
}

constexpr bool Copies(RowOp op) { return VectorBytes(op).row == VectorBytes(op).cache; }

// Everything that vectors must not straddle, or-ed together: a power of two divides all of it when
// it divides `bits`. In bytes.
struct Alignment {
  uint64_t bits = 0;

  void Add(const void* pointer) { bits |= reinterpret_cast<uintptr_t>(pointer); }
  void AddElements(std::initializer_list<int64_t> distances, DType dtype) {
    for (int64_t distance : distances) {
      bits |= static_cast<uint64_t>(distance * ElementBytes(dtype));
    }
  }
  bool Allows(int64_t bytes) const { return bits % static_cast<uint64_t>(bytes) == 0; }
};

// The widest op that `rows` (staging and input) and `cache` allow; both hold pointers, strides and
// head_dim. REQUIRES: pointers aligned to their elements; row_dtype is not float8.
constexpr RowOp ChooseRowOp(DType row_dtype, DType cache_dtype, const Alignment& rows,
                            const Alignment& cache) {
  if (row_dtype == cache_dtype) {
    const auto both = [&](int64_t bytes) { return rows.Allows(bytes) && cache.Allows(bytes); };
    return both(16)  ? RowOp::kCopy16
           : both(8) ? RowOp::kCopy8
           : both(4) ? RowOp::kCopy4
                     : RowOp::kCopy2;
  }
  const bool wide = rows.Allows(16) && cache.Allows(8);
  switch (row_dtype) {
    case DType::kFloat16:
      return wide ? RowOp::kQuantizeHalfx8 : RowOp::kQuantizeHalfx1;
    case DType::kBFloat16:
      return wide ? RowOp::kQuantizeBFloat16x8 : RowOp::kQuantizeBFloat16x1;
    default:
      return wide ? RowOp::kQuantizeFloatx8 : RowOp::kQuantizeFloatx1;
  }
}

// Division of n by d as one multiplication, for n * d < 2^32.
struct SmallDivisor {
  uint32_t multiplier = 0;  // ceil(2^32 / d); 0 stands for d = 1

  static constexpr SmallDivisor By(uint32_t divisor) {
    return {divisor <= 1 ? 0
                         : static_cast<uint32_t>(((uint64_t{1} << 32) + divisor - 1) / divisor)};
  }
};

// How a row splits into vectors of one op.
struct RowShape {
  int32_t vectors_per_row = 0;
  int32_t vectors_per_head = 0;
  SmallDivisor by_head;
};

constexpr RowShape ShapeOf(RowOp op, int32_t num_heads, int32_t head_dim, DType row_dtype) {
  const int32_t per_head = head_dim * ElementBytes(row_dtype) / VectorBytes(op).row;
  return {num_heads * per_head, per_head, SmallDivisor::By(static_cast<uint32_t>(per_head))};
}

// log2 of a power of two, otherwise -1: pages of 16 tokens need no 64-bit division.
constexpr int32_t ExactLog2(int64_t value) {
  int32_t log = 0;
  while (log < 62 && (int64_t{1} << log) < value) ++log;
  return (int64_t{1} << log) == value ? log : -1;
}

}  // namespace nwor
