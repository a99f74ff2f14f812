#pragma once

#include <cstdint>

#include "kv_interceptor/commit/grid.h"
#include "kv_interceptor/commit/table.cuh"

// Compact views that a commit feeds, on the device. Accepted rows are stored twice by the warps
// that move them; row 0 of each request is copied from the cache by the same warps afterwards.
// None of this is compiled into the kernels of commits without views.

namespace nwor {

// Where a request's rows begin in its view, and the slot of its row 0; -1: not fed, none.
struct TailEntry {
  int32_t begin = -1;
  int64_t root_slot = -1;

  // Where its first accepted row goes, if the batch is valid; below 0: it is not fed.
  __device__ int32_t FirstRow() const {
    return begin < 0 ? -1 : static_cast<int32_t>(End(/*count=*/0));
  }
  // Where its `count` rows end: unsigned, as the last int32 and one more must not become
  // negative. REQUIRES: it is fed.
  __device__ uint32_t End(int32_t count) const {
    return static_cast<uint32_t>(begin) + (root_slot >= 0 ? 1 : 0) + static_cast<uint32_t>(count);
  }
};

// Distances in bytes.
struct TailTable {
  char* data[2];  // K, V
  int64_t layer;
  int64_t request;
  int64_t head;
  int64_t token;
  CommitTail params;

  __device__ char* At(int layer_idx, int side, int32_t request_idx, int32_t token_idx) const {
    return data[side] + layer_idx * layer + request_idx * request + token_idx * token;
  }
  // Both words of a request, on their way at once.
  __device__ TailEntry Load(int32_t request_idx) const {
    return {params.begin[request_idx], params.root_slots[request_idx]};
  }
};

// A commit without views: every question about them is answered here, at compile time.
struct NoTail {
  static constexpr int64_t head = 0;
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
  const int32_t num_requests = NumRequests(batch);
#pragma unroll 1
  for (int32_t request = static_cast<int32_t>(threadIdx.x % 32); request < num_requests;
       request += 32) {
    const int32_t first = tail.Load(request).FirstRow();
    if (first >= 0) tail.params.held[request] = first + batch.counts[request];
  }
}

// The rows of one layer that are in the cache already, dealt to `num_warps` warps. REQUIRES: the
// batch is valid; op copies.
template <RowOp op>
__device__ __noinline__ void FeedRoots(const BatchTable& batch, const LayerTable& layer,
                                       int layer_idx, const TailTable& tail, uint32_t warp,
                                       uint32_t num_warps) {
  const GroupTable& group = batch.groups[0];
  const RowShape shape = group.shape;
  const auto num_units = static_cast<uint32_t>(2 * NumRequests(batch));
#pragma unroll 1
  for (uint32_t unit = warp; unit < num_units; unit += num_warps) {
    const auto request = static_cast<int32_t>(unit / 2);
    const auto side = static_cast<int>(unit % 2);
    const TailEntry entry = tail.Load(request);
    if (entry.begin < 0 || entry.root_slot < 0) continue;
    const CacheStrides& strides = group.cache[side];
    const char* from = layer.cache[side] + SlotOffset(strides, group.pages, entry.root_slot);
    char* to = tail.At(layer_idx, side, request, entry.begin);
#pragma unroll 1
    for (int32_t first = static_cast<int32_t>(threadIdx.x % 32); first < shape.vectors_per_row;
         first += kCommitSliceVectors) {
      RowVector<op> vectors[kCommitVectorsPerLane];
#pragma unroll
      for (int i = 0; i < kCommitVectorsPerLane; ++i) {
        const VectorPlace place(shape, first + i * 32);
        if (first + i * 32 >= shape.vectors_per_row) break;
        vectors[i].Load(from + place.Offset(strides.head, VectorBytes(op).row));
      }
#pragma unroll
      for (int i = 0; i < kCommitVectorsPerLane; ++i) {
        const VectorPlace place(shape, first + i * 32);
        if (first + i * 32 >= shape.vectors_per_row) break;
        vectors[i].StoreRow(to + place.Offset(tail.head, VectorBytes(op).row));
      }
    }
  }
}

}  // namespace nwor
