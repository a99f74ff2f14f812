#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "base/cache_layout.h"
#include "base/row_op.h"
#include "kv_interceptor/stage/stage.h"

// How one row's K or V moves on the device: addresses of its vectors, and the vectors themselves in
// registers, so that a kernel can load early and store late.

namespace nwor {

// K is side 0, V is side 1; all distances in bytes.
struct RowsSide {
  char* data;
  int64_t row;
  int64_t head;
};

struct CacheStrides {
  int64_t page;
  int64_t token;
  int64_t head;
};

struct Pages {
  int64_t num_slots;
  int32_t page_size;
  int32_t page_shift;  // -1: page_size is no power of two
};

inline RowsSide MakeRowsSide(const KvRowsView& rows, int side, DType dtype) {
  const int64_t bytes = ElementBytes(dtype);
  return side == 0
             ? RowsSide{static_cast<char*>(rows.key), rows.key_row * bytes, rows.key_head * bytes}
             : RowsSide{static_cast<char*>(rows.value), rows.value_row * bytes,
                        rows.value_head * bytes};
}

inline CacheStrides MakeCacheStrides(const CacheGeometry& geometry, int side) {
  const int64_t bytes = ElementBytes(geometry.dtype);
  const KvStrides& strides = side == 0 ? geometry.key : geometry.value;
  return {strides.page * bytes, strides.token * bytes, strides.head * bytes};
}

inline Pages MakePages(const CacheGeometry& geometry) {
  return {geometry.num_slots(), geometry.page_size, ExactLog2(geometry.page_size)};
}

inline void AddRows(Alignment& alignment, const KvRowsView& rows, int head_dim, DType dtype) {
  alignment.Add(rows.key);
  alignment.Add(rows.value);
  alignment.AddElements({rows.key_row, rows.key_head, rows.value_row, rows.value_head, head_dim},
                        dtype);
}

inline void AddCache(Alignment& alignment, const CacheGeometry& geometry) {
  for (const KvStrides& strides : {geometry.key, geometry.value}) {
    alignment.AddElements({strides.page, strides.token, strides.head, geometry.head_dim},
                          geometry.dtype);
  }
}

__device__ inline uint32_t Divide(uint32_t n, SmallDivisor by) {
  return by.multiplier == 0 ? n : __umulhi(n, by.multiplier);
}

// The page of a slot; of a token of a request, the place of its page in the block table. kShift:
// the page size is a power of two.
template <bool kShift = false, typename T>
__device__ T PageOf(const Pages& pages, T slot) {
  return kShift || pages.page_shift >= 0 ? slot >> pages.page_shift : slot / pages.page_size;
}

// Where a slot's row begins, relative to its layer's cache.
template <bool kShift = false>
__device__ int64_t SlotOffset(const CacheStrides& strides, const Pages& pages, int64_t slot) {
  const int64_t page = PageOf<kShift>(pages, slot);
  return page * strides.page + (slot - page * pages.page_size) * strides.token;
}

// The place of vector `index` of a row: its head, and its distance from the head's first channel
// in vectors.
struct VectorPlace {
  int32_t head;
  int32_t within;

  __device__ VectorPlace(const RowShape& shape, int32_t index)
      : head(static_cast<int32_t>(Divide(index, shape.by_head))),
        within(index - head * shape.vectors_per_head) {}

  __device__ int64_t Offset(int64_t head_stride, int32_t vector_bytes) const {
    return head * head_stride + within * vector_bytes;
  }
};

template <typename Word>
struct CopyVector {
  Word word;

  __device__ void Load(const char* row) { word = *reinterpret_cast<const Word*>(row); }
  __device__ void StoreRow(char* row) const { *reinterpret_cast<Word*>(row) = word; }
  __device__ void StoreCache(char* cache, float) const { StoreRow(cache); }
};

__device__ inline float ToFloat(float x) { return x; }
__device__ inline float ToFloat(__half x) { return __half2float(x); }
__device__ inline float ToFloat(__nv_bfloat16 x) { return __bfloat162float(x); }

// Divides, never multiplies by a reciprocal: the bytes must equal those of the engine's own write.
template <typename T, int kChannels>
struct QuantizeVector {
  using Word = std::conditional_t<kChannels == 1, T, uint4>;
  static constexpr int kWords =
      kChannels * static_cast<int>(sizeof(T)) / static_cast<int>(sizeof(Word));
  Word words[kWords];

  __device__ void Load(const char* row) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const Word*>(row)[i];
  }
  __device__ void StoreRow(char* row) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<Word*>(row)[i] = words[i];
  }
  __device__ void StoreCache(char* cache, float scale) const {
    const T* channels = reinterpret_cast<const T*>(words);
    if constexpr (kChannels == 1) {
      *reinterpret_cast<uint8_t*>(cache) =
          __nv_cvt_float_to_fp8(ToFloat(channels[0]) / scale, __NV_SATFINITE, __NV_E4M3);
    } else {
      static_assert(kChannels == 8);
      uint32_t packed[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        packed[half] = 0;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const T* two = channels + half * 4 + pair * 2;
          const float2 scaled = {ToFloat(two[0]) / scale, ToFloat(two[1]) / scale};
          packed[half] |=
              static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3))
              << (16 * pair);
        }
      }
      *reinterpret_cast<uint2*>(cache) = make_uint2(packed[0], packed[1]);
    }
  }
};

template <RowOp op>
struct RowVectorOf;
template <>
struct RowVectorOf<RowOp::kCopy16> : std::type_identity<CopyVector<uint4>> {};
template <>
struct RowVectorOf<RowOp::kCopy8> : std::type_identity<CopyVector<uint2>> {};
template <>
struct RowVectorOf<RowOp::kCopy4> : std::type_identity<CopyVector<uint32_t>> {};
template <>
struct RowVectorOf<RowOp::kCopy2> : std::type_identity<CopyVector<uint16_t>> {};
template <>
struct RowVectorOf<RowOp::kQuantizeHalfx8> : std::type_identity<QuantizeVector<__half, 8>> {};
template <>
struct RowVectorOf<RowOp::kQuantizeBFloat16x8>
    : std::type_identity<QuantizeVector<__nv_bfloat16, 8>> {};
template <>
struct RowVectorOf<RowOp::kQuantizeFloatx8> : std::type_identity<QuantizeVector<float, 8>> {};
template <>
struct RowVectorOf<RowOp::kQuantizeHalfx1> : std::type_identity<QuantizeVector<__half, 1>> {};
template <>
struct RowVectorOf<RowOp::kQuantizeBFloat16x1>
    : std::type_identity<QuantizeVector<__nv_bfloat16, 1>> {};
template <>
struct RowVectorOf<RowOp::kQuantizeFloatx1> : std::type_identity<QuantizeVector<float, 1>> {};
template <RowOp op>
using RowVector = typename RowVectorOf<op>::type;

// Calls `body` with the op as an integral_constant; on the host to pick a kernel, on the device to
// pick a branch.
template <typename Body>
__host__ __device__ inline void DispatchRowOp(RowOp op, Body&& body) {
#define NWOR_CASE(name) \
  case RowOp::name:     \
    return body(std::integral_constant<RowOp, RowOp::name>{});
  switch (op) {
    NWOR_CASE(kCopy16)
    NWOR_CASE(kCopy8)
    NWOR_CASE(kCopy4)
    NWOR_CASE(kCopy2)
    NWOR_CASE(kQuantizeHalfx8)
    NWOR_CASE(kQuantizeBFloat16x8)
    NWOR_CASE(kQuantizeFloatx8)
    NWOR_CASE(kQuantizeHalfx1)
    NWOR_CASE(kQuantizeBFloat16x1)
    NWOR_CASE(kQuantizeFloatx1)
  }
#undef NWOR_CASE
}

}  // namespace nwor
