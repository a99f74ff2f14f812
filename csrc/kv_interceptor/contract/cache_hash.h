#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kv_interceptor/interceptor.h"

// 64-bit hashes of cache slots and of the rows that should be in them. Read through the layout's
// strides, so the bytes between two rows of a strided cache do not count.

namespace nwor {

// What one slot holds, or one row would put there.
struct SlotHash {
  uint64_t key = 0;
  uint64_t value = 0;

  friend bool operator==(const SlotHash&, const SlotHash&) = default;
};

// `num_runs` runs of `run_bytes` (the heads of one row), `stride_bytes` apart. Equal bytes hash
// alike whatever the strides.
uint64_t HashRuns(const std::byte* data, int64_t num_runs, int64_t run_bytes, int64_t stride_bytes);

// Every slot of one layer's cache, and one hash per page over its slots.
struct CacheHashes {
  std::vector<SlotHash> slots;
  std::vector<uint64_t> pages;
};

// Waits for the device; copies a CUDA cache to the host some pages at a time.
CacheHashes HashCache(const Interceptor::LayerInfo& layer);

// Only the given slots, which must be inside the cache.
std::vector<SlotHash> HashSlots(const Interceptor::LayerInfo& layer,
                                const std::vector<int64_t>& slots);

// How n rows [n, H, D] of the model hash as they are (what staging must hold), and as a direct
// write would put them into the layer's cache (quantised for a float8 cache).
struct RowHashes {
  std::vector<SlotHash> staged;
  std::vector<SlotHash> cached;
};
RowHashes HashRows(const Interceptor::LayerInfo& layer, const at::Tensor& key,
                   const at::Tensor& value);

}  // namespace nwor
