#pragma once

#include <cstdint>

#include "base/types.h"

// How a paged K/V cache lies in memory: base pointers and strides, never an assumed shape. Engines
// have used (2,P,S,H,D), (P,2,S,H,D) and packed (P,H,S,2D) within one year; each is a pair of
// strided [P,S,H,D] views here. Plain data without torch: kernels take it by value.

namespace nwor {

// Distances in elements. The channels of one head are always contiguous.
struct KvStrides {
  int64_t page = 0;
  int64_t token = 0;
  int64_t head = 0;

  friend bool operator==(const KvStrides&, const KvStrides&) = default;
};

// What all layers of a cache group have in common.
struct CacheGeometry {
  int64_t num_pages = 0;
  int32_t page_size = 0;  // tokens per page
  int32_t num_heads = 0;
  int32_t head_dim = 0;
  DType dtype = DType::kBFloat16;
  KvStrides key;
  KvStrides value;

  // Slot = page * page_size + offset, in 64 bits.
  constexpr int64_t num_slots() const { return num_pages * page_size; }

  friend bool operator==(const CacheGeometry&, const CacheGeometry&) = default;
};

// The quantisation scales of a float8 cache: stored = round(value / scale). One scale for the
// tensor (count 1) or one per KV head (count num_heads); null means 1.
struct KvScales {
  const float* key = nullptr;
  const float* value = nullptr;
  int32_t key_count = 0;
  int32_t value_count = 0;
};

// One layer's cache. Memory belongs to the engine.
struct CacheLayout {
  void* key = nullptr;
  void* value = nullptr;
  CacheGeometry geometry;
  KvScales scales;
};

// K and V rows [rows, heads, head_dim] with contiguous channels; strides in elements.
struct KvRowsView {
  void* key = nullptr;
  void* value = nullptr;
  int64_t key_row = 0, key_head = 0;
  int64_t value_row = 0, value_head = 0;
};

}  // namespace nwor
