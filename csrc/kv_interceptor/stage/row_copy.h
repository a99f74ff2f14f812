#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/cache_layout.h"
#include "base/fp8.h"
#include "base/types.h"
#include "kv_interceptor/stage/stage.h"

// How one row's K or V moves on the host: whole, head by head, or quantised.

namespace nwor {

// One side (K or V) of a row: `num_heads` runs of `head_bytes`, `stride_bytes` apart.
struct HeadRuns {
  std::byte* data;
  int64_t stride_bytes;
};

inline void CopyHeads(HeadRuns to, HeadRuns from, int num_heads, int64_t head_bytes) {
  if (to.stride_bytes == head_bytes && from.stride_bytes == head_bytes) {
    std::memcpy(to.data, from.data, static_cast<size_t>(num_heads * head_bytes));
    return;
  }
  for (int head = 0; head < num_heads; ++head) {
    std::memcpy(to.data + head * to.stride_bytes, from.data + head * from.stride_bytes,
                static_cast<size_t>(head_bytes));
  }
}

template <typename T>
void QuantizeHeads(HeadRuns to, HeadRuns from, int num_heads, int head_dim, const float* scales,
                   int num_scales) {
  for (int head = 0; head < num_heads; ++head) {
    const float scale = scales == nullptr ? 1.0f : scales[num_scales == 1 ? 0 : head];
    const T* source = reinterpret_cast<const T*>(from.data + head * from.stride_bytes);
    auto* target = reinterpret_cast<uint8_t*>(to.data + head * to.stride_bytes);
    for (int i = 0; i < head_dim; ++i) {
      target[i] = QuantizeE4M3(static_cast<float>(source[i]) / scale);
    }
  }
}

// Puts one side of a row into the cache, converting when the cache is float8.
inline void StoreHeads(HeadRuns to, HeadRuns from, const CacheGeometry& geometry, DType row_dtype,
                       const float* scales, int num_scales) {
  const int heads = geometry.num_heads, dim = geometry.head_dim;
  if (geometry.dtype == row_dtype) {
    CopyHeads(to, from, heads, int64_t{dim} * ElementBytes(row_dtype));
    return;
  }
  switch (row_dtype) {
    case DType::kFloat32:
      return QuantizeHeads<float>(to, from, heads, dim, scales, num_scales);
    case DType::kFloat16:
      return QuantizeHeads<c10::Half>(to, from, heads, dim, scales, num_scales);
    case DType::kBFloat16:
      return QuantizeHeads<c10::BFloat16>(to, from, heads, dim, scales, num_scales);
    case DType::kFloat8E4M3:
      return;  // rows are never float8: the checks at the boundary say so
  }
}

inline HeadRuns CacheRun(void* base, const KvStrides& strides, const CacheGeometry& geometry,
                         int64_t slot) {
  const int64_t page = slot / geometry.page_size, token = slot % geometry.page_size;
  const int64_t bytes = ElementBytes(geometry.dtype);
  return {static_cast<std::byte*>(base) + (page * strides.page + token * strides.token) * bytes,
          strides.head * bytes};
}

inline HeadRuns RowRun(void* base, int64_t row_stride, int64_t head_stride, int64_t row,
                       DType dtype) {
  const int64_t bytes = ElementBytes(dtype);
  return {static_cast<std::byte*>(base) + row * row_stride * bytes, head_stride * bytes};
}

// K and V of `row` into `slot`.
inline void StoreRow(const CacheLayout& cache, int64_t slot, const KvRowsView& rows, int64_t row,
                     DType row_dtype) {
  const CacheGeometry& geometry = cache.geometry;
  StoreHeads(CacheRun(cache.key, geometry.key, geometry, slot),
             RowRun(rows.key, rows.key_row, rows.key_head, row, row_dtype), geometry, row_dtype,
             cache.scales.key, cache.scales.key_count);
  StoreHeads(CacheRun(cache.value, geometry.value, geometry, slot),
             RowRun(rows.value, rows.value_row, rows.value_head, row, row_dtype), geometry,
             row_dtype, cache.scales.value, cache.scales.value_count);
}

}  // namespace nwor
