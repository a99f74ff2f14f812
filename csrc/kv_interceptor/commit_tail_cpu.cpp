#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstddef>

#include "kv_interceptor/commit.h"
#include "kv_interceptor/commit_path.h"
#include "kv_interceptor/row_copy.h"

namespace nwor {
namespace {

// One side of a row of a float8 cache, as it is read back.
template <typename T>
void DequantizeHeads(HeadRuns to, HeadRuns from, const CacheGeometry& geometry, const float* scales,
                     int num_scales) {
  for (int head = 0; head < geometry.num_heads; ++head) {
    const float scale = scales == nullptr ? 1.0f : scales[num_scales == 1 ? 0 : head];
    const auto* codes = reinterpret_cast<const uint8_t*>(from.data + head * from.stride_bytes);
    T* channels = reinterpret_cast<T*>(to.data + head * to.stride_bytes);
    for (int i = 0; i < geometry.head_dim; ++i) {
      channels[i] = static_cast<T>(DequantizeE4M3(codes[i]) * scale);
    }
  }
}

void ReadBack(HeadRuns to, HeadRuns from, const CacheGeometry& geometry, DType dtype,
              const float* scales, int num_scales) {
  if (geometry.dtype == dtype) {
    CopyHeads(to, from, geometry.num_heads, int64_t{geometry.head_dim} * ElementBytes(dtype));
    return;
  }
  switch (dtype) {
    case DType::kFloat16:
      return DequantizeHeads<c10::Half>(to, from, geometry, scales, num_scales);
    case DType::kBFloat16:
      return DequantizeHeads<c10::BFloat16>(to, from, geometry, scales, num_scales);
    default:
      return DequantizeHeads<float>(to, from, geometry, scales, num_scales);
  }
}

// K and V of one slot of one layer to a token of a view: the rows are in the cache by now.
void FeedToken(const CommitParams& params, int layer, int32_t request, int64_t slot,
               int32_t token) {
  const CommitTail& tail = params.tail;
  const CommitLayer& from = params.layers[layer];
  const CommitGroup& group = params.groups[from.group];
  const CacheGeometry& geometry = group.geometry;
  const int64_t bytes = ElementBytes(group.dtype);
  const int64_t at =
      layer * tail.layer_stride + request * tail.request_stride + token * tail.token_stride;
  const auto run = [&](void* base) {
    return HeadRuns{static_cast<std::byte*>(base) + at * bytes, tail.head_stride * bytes};
  };
  ReadBack(run(tail.keys), CacheRun(from.key, geometry.key, geometry, slot), geometry, group.dtype,
           from.scales.key, from.scales.key_count);
  ReadBack(run(tail.values), CacheRun(from.value, geometry.value, geometry, slot), geometry,
           group.dtype, from.scales.value, from.scales.value_count);
}

}  // namespace

void FeedTail(const CommitParams& params) {
  const CommitTail& tail = params.tail;
  for (int32_t b = 0; b < params.num_requests; ++b) {
    if (tail.begin[b] < 0) continue;
    const int32_t first = tail.FirstRow(b), count = params.counts[b];
    for (int layer = 0; layer < params.num_layers; ++layer) {
      if (first > tail.begin[b]) FeedToken(params, layer, b, tail.RootSlot(b), tail.begin[b]);
      for (int32_t i = 0; i < count; ++i) {
        const int32_t row = StagingRow(params, b, i);
        FeedToken(params, layer, b, DestinationSlot(params, 0, b, i, row), first + i);
      }
    }
    if (tail.held != nullptr) tail.held[b] = first + count;
  }
}

}  // namespace nwor
