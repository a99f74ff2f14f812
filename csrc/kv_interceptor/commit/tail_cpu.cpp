#include <cstddef>

#include "kv_interceptor/commit/commit.h"
#include "kv_interceptor/commit/path.h"
#include "kv_interceptor/stage/row_copy.h"

namespace nwor {
namespace {

// K and V of one slot of one layer to a token of a view: the rows are in the cache by now.
void FeedToken(const CommitParams& params, int layer, int32_t request, int64_t slot,
               int32_t token) {
  const CommitTail& tail = params.tail;
  const CommitLayer& from = params.layers[layer];
  const CacheGeometry& geometry = params.groups[from.group].geometry;
  const int64_t bytes = ElementBytes(geometry.dtype);
  const int64_t at =
      layer * tail.layer_stride + request * tail.request_stride + token * tail.token_stride;
  const auto copy = [&](void* view, void* cache, const KvStrides& strides) {
    CopyHeads({static_cast<std::byte*>(view) + at * bytes, tail.head_stride * bytes},
              CacheRun(cache, strides, geometry, slot), geometry.num_heads,
              geometry.head_dim * bytes);
  };
  copy(tail.keys, from.key, geometry.key);
  copy(tail.values, from.value, geometry.value);
}

}  // namespace

void FeedTail(const CommitParams& params) {
  const CommitTail& tail = params.tail;
  for (int32_t b = 0; b < params.num_requests; ++b) {
    if (tail.begin[b] < 0) continue;
    const auto first = static_cast<int32_t>(tail.FirstRow(b));  // it fits: the view has room
    const int32_t count = params.counts[b];
    for (int layer = 0; layer < params.num_layers; ++layer) {
      if (first > tail.begin[b]) FeedToken(params, layer, b, tail.root_slots[b], tail.begin[b]);
      for (int32_t i = 0; i < count; ++i) {
        const int32_t row = StagingRow(params, b, i);
        FeedToken(params, layer, b, DestinationSlot(params, 0, b, i, row), first + i);
      }
    }
    tail.held[b] = first + count;
  }
}

}  // namespace nwor
