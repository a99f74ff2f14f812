#include <cstddef>

#include "base/row_read.h"
#include "kv_interceptor/commit/commit.h"
#include "kv_interceptor/commit/path.h"
#include "kv_interceptor/stage/row_copy.h"

namespace nwor {
namespace {

// One side of a row, as it is read back from the cache.
void ReadBack(HeadRuns to, HeadRuns from, const CacheGeometry& geometry, DType dtype,
              const float* scales, int num_scales) {
  for (int head = 0; head < geometry.num_heads; ++head) {
    ReadHead(from.data + head * from.stride_bytes, geometry.dtype, to.data + head * to.stride_bytes,
             dtype, geometry.head_dim, ScaleOfHead(scales, num_scales, head));
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
    const auto first = static_cast<int32_t>(tail.FirstRow(b));  // it fits: the view has room
    const int32_t count = params.counts[b];
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
