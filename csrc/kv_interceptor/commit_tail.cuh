#pragma once

#include <cstdint>

#include "kv_interceptor/commit_table.cuh"

// Compact views that a commit feeds, on the device. Accepted rows are stored twice by the warps
// that move them; row 0 of each request is copied from the cache by the same warps afterwards.
// None of this is compiled into the kernels of commits without views.

namespace nwor {

// Distances in bytes.
struct TailTable {
  char* data[2];  // K, V; null: no views
  int64_t layer;
  int64_t request;
  int64_t head;
  int64_t token;
  CommitTail params;

  __device__ char* At(int layer_idx, int side, int32_t request_idx, int32_t token_idx) const {
    return data[side] + layer_idx * layer + request_idx * request + token_idx * token;
  }
  // Where a request's first accepted row goes in its view, -1: it is not fed.
  __device__ int32_t FirstInView(int32_t request_idx) const {
    if (data[0] == nullptr || params.begin[request_idx] < 0) return -1;
    return params.FirstRow(request_idx);
  }
};

// A commit without views: every question about them is answered here, at compile time.
struct NoTail {
  static constexpr int64_t head = 0;
  __device__ char* At(int, int, int32_t, int32_t) const { return nullptr; }
  __device__ int32_t FirstInView(int32_t) const { return -1; }
};

inline TailTable MakeTailTable(const CommitParams& params) {
  const CommitTail& tail = params.tail;
  const int64_t bytes = ElementBytes(params.groups[0].dtype);
  return {{static_cast<char*>(tail.keys), static_cast<char*>(tail.values)},
          tail.layer_stride * bytes,
          tail.request_stride * bytes,
          tail.head_stride * bytes,
          tail.token_stride * bytes,
          tail};
}

// Tells how many tokens the views have now. One warp, after the verdict.
__device__ inline void PublishHeld(const BatchTable& batch, const TailTable& tail) {
  if (tail.data[0] == nullptr || tail.params.held == nullptr) return;
  const int32_t num_requests = batch.num_positions / batch.positions_per_request;
#pragma unroll 1
  for (int32_t request = static_cast<int32_t>(threadIdx.x % 32); request < num_requests;
       request += 32) {
    const int32_t first = tail.FirstInView(request);
    if (first >= 0) tail.params.held[request] = first + batch.counts[request];
  }
}

// The rows of one layer that are in the cache already, dealt to `num_warps` warps. REQUIRES: the
// batch is valid.
template <RowOp op>
__device__ __noinline__ void FeedRoots(const BatchTable& batch, const LayerTable& layer,
                                       int layer_idx, const TailTable& tail, int32_t warp,
                                       int32_t num_warps) {
  if (tail.data[0] == nullptr) return;
  const GroupTable& group = batch.groups[0];
  const int32_t num_requests = batch.num_positions / batch.positions_per_request;
#pragma unroll 1
  for (int32_t unit = warp; unit < 2 * num_requests; unit += num_warps) {
    const int32_t request = unit / 2, side = unit % 2;
    const int64_t slot = tail.params.RootSlot(request);
    const int32_t begin = tail.params.begin[request];
    if (begin < 0 || slot < 0) continue;
    const CacheStrides& strides = group.cache[side];
    const char* from = layer.cache[side] + SlotOffset(strides, group.pages, slot);
    char* to = tail.At(layer_idx, side, request, begin);
#pragma unroll 1
    for (int32_t i = static_cast<int32_t>(threadIdx.x % 32); i < group.shape.vectors_per_row;
         i += 32) {
      const VectorPlace place(group.shape, i);
      const float* scales = layer.scales[side];
      const float scale = scales == nullptr ? 1.0f : scales[place.head * layer.scale_stride[side]];
      RowVector<op> vector;
      vector.LoadCache(from + place.Offset(strides.head, VectorBytes(op).cache), scale);
      vector.StoreRow(to + place.Offset(tail.head, VectorBytes(op).row));
    }
  }
}

}  // namespace nwor
