#pragma once

#include <cstdint>
#include <type_traits>

#include "kv_interceptor/commit/error.h"
#include "kv_interceptor/commit/grid.h"
#include "kv_interceptor/commit/table.cuh"
#include "kv_interceptor/commit/tail.cuh"
#include "kv_interceptor/commit/verdict.cuh"

// What the commit kernels do once they know: move rows, and publish the result.

namespace nwor {

// K or V of one layer, and the group it belongs to.
struct Plane {
  const GroupTable& group;
  int side;
  const char* staged;
  char* cache;
  const float* scales;
  int32_t scale_stride;
};

template <int kLayers>
__device__ Plane SelectPlane(const CommitTable<kLayers>& table, int plane_idx) {
  const LayerTable& layer = table.layers[plane_idx / 2];
  const GroupTable& group = table.batch.groups[layer.group];
  const int side = plane_idx % 2;
  return {group,
          side,
          group.staged[side].data + layer.staged_layer * group.staged_layer[side],
          layer.cache[side],
          layer.scales[side],
          layer.scale_stride[side]};
}

// Calls `body` with each of a lane's vectors, from its first, number `first` of the row, on: with
// its number of them and its distance from the row's beginning, `head` bytes from head to head.
template <bool kEasy, typename Body>
__device__ void ForVectors(const GroupTable& group, int32_t first, int64_t head, int32_t bytes,
                           const Body& body) {
  if (kEasy || group.vector_shift >= 0) {
    const int64_t offset = (first >> group.vector_shift) * head +
                           (first & ((1 << group.vector_shift) - 1)) * int64_t{bytes};
    const int64_t step = head << (5 - group.vector_shift);
#pragma unroll
    for (int i = 0; i < kCommitVectorsPerLane; ++i) body(i, offset + i * step);
  } else {
#pragma unroll
    for (int i = 0; i < kCommitVectorsPerLane; ++i) {
      body(i, VectorPlace(group.shape, first + i * 32).Offset(head, bytes));
    }
  }
}

// One slice of one accepted row in the registers of a warp: on its way while the batch is
// validated. kViews: it may go to a compact view as well. kEasy: its group is.
template <RowOp op, bool kViews, bool kEasy>
class WarpSlice {
 public:
  // `row` < 0: there is nothing to move. `slice` counts slices within the row. Nothing here waits
  // for `slot`, nor for where it lies: that would keep the warp from the verdict.
  __device__ void Load(const Plane& plane, int32_t row, int64_t slot, int32_t slice) {
    first_ = slice * kCommitSliceVectors + static_cast<int32_t>(threadIdx.x % 32);
    num_vectors_ = row < 0 ? 0 : plane.group.shape.vectors_per_row - first_;
    if (num_vectors_ <= 0) return;
    const RowsSide& side = plane.group.staged[plane.side];
    const char* from = plane.staged + row * side.row;
    ForVectors<kEasy>(plane.group, first_, side.head, VectorBytes(op).row,
                      [&](int i, int64_t offset) {
                        if (Has(i)) vectors_[i].Load(from + offset);
                      });
    slot_ = slot;
  }

  // Where the row begins in a compact view, or null.
  __device__ void GoesTo(char* view) { view_ = view; }

  __device__ void Store(const Plane& plane, int64_t view_head) const {
    if (num_vectors_ <= 0) return;
    const CacheStrides& strides = plane.group.cache[plane.side];
    char* to = plane.cache + SlotOffset<kEasy>(strides, plane.group.pages, slot_);
    const auto scale_of = [&](int i) {
      if (plane.scales == nullptr) return 1.0f;
      return plane
          .scales[VectorPlace(plane.group.shape, first_ + i * 32).head * plane.scale_stride];
    };
    ForVectors<kEasy>(plane.group, first_, strides.head, VectorBytes(op).cache,
                      [&](int i, int64_t offset) {
                        if (Has(i)) vectors_[i].StoreCache(to + offset, scale_of(i));
                      });
    if constexpr (kViews) {
      if (view_ == nullptr) return;
      ForVectors<kEasy>(plane.group, first_, view_head, VectorBytes(op).row,
                        [&](int i, int64_t offset) {
                          if (Has(i)) vectors_[i].StoreRow(view_ + offset);
                        });
    }
  }

 private:
  __device__ bool Has(int i) const { return i * 32 < num_vectors_; }

  RowVector<op> vectors_[kCommitVectorsPerLane];
  int64_t slot_;
  char* view_ = nullptr;
  int32_t first_;
  int32_t num_vectors_ = 0;  // from the lane's first on
};

// The part of the rows of one plane that a warp moves: every so many slices, one at a time.
template <RowOp op, typename Tail, bool kEasy = false>
class WarpShare {
  static constexpr bool kViews = !std::is_same_v<Tail, NoTail>;

 public:
  // `tail`: compact views that the rows go to as well.
  __device__ WarpShare(const BatchTable& batch, const Plane& plane, const Tail& tail)
      : batch_(batch),
        plane_(plane),
        tail_(tail),
        num_slices_(kEasy ? 1 << plane.group.slice_shift
                          : NumCommitSlices(plane.group.shape.vectors_per_row)),
        num_units_(batch.num_positions * num_slices_),
        step_(kCommitWarps * static_cast<int32_t>(gridDim.y)),
        unit_(static_cast<int32_t>(blockIdx.y + threadIdx.x / 32 * gridDim.y)) {}

  // The entry of the first slice, for Start.
  __device__ Entry LoadFirst() const { return LoadEntry(batch_, plane_.group, Position()); }

  // Starts the first slice, so that it is on its way while the batch is validated.
  __device__ void Start(const Entry& first) {
    if (more()) Load(first);
  }

  // Stores what was started and moves the rest. REQUIRES: the batch is valid.
  __device__ void Finish() {
    while (more()) {
      slice_.Store(plane_, tail_.head);
      unit_ += step_;
      if (more()) Load(LoadEntry(batch_, plane_.group, Position()));
    }
  }

 private:
  __device__ bool more() const { return unit_ < num_units_; }
  __device__ int32_t Position() const {
    if constexpr (kEasy) return unit_ >> plane_.group.slice_shift;
    return num_slices_ <= 1 ? unit_ : unit_ / num_slices_;
  }

  __device__ void Load(const Entry& entry) {
    const int32_t position = Position();
    [[maybe_unused]] TailEntry in_view;
    if constexpr (kViews) in_view = tail_.Load(entry.request);
    const bool accepted = entry.count_valid(batch_) && entry.index < entry.count;
    const int32_t row = accepted ? StagingRow(batch_, entry.request, entry.path_entry) : -1;
    const GroupTable& group = plane_.group;
    const int64_t slot = group.slots == nullptr && row >= 0 ? group.row_slots[row] : entry.slot;
    slice_.Load(plane_, row, slot, unit_ - position * num_slices_);
    if constexpr (kViews) {
      const int32_t first = in_view.FirstRow();
      slice_.GoesTo(first < 0 ? nullptr
                              : tail_.At(static_cast<int>(blockIdx.x / 2), plane_.side,
                                         entry.request, first + entry.index));
    }
  }

  const BatchTable& batch_;
  const Plane& plane_;
  const Tail& tail_;
  const int32_t num_slices_;
  const int32_t num_units_;
  const int32_t step_;
  int32_t unit_;
  WarpSlice<op, kViews, kEasy> slice_;
};

// A lane's counter as it was before this commit. Nobody waits for it here.
__device__ inline int64_t LoadCounter(const BatchTable& batch) {
  const uint32_t lane = threadIdx.x % 32;
  return batch.counters != nullptr && lane < kNumCommitCounters ? batch.counters[lane] : 0;
}

// One warp of the grid, whose first lane has the verdict. `counter`: its lanes'.
__device__ inline void WriteStatus(const BatchTable& batch, const CommitVerdict& verdict,
                                   int64_t num_tokens, int64_t counter) {
  const uint32_t lane = threadIdx.x % 32;
  if (batch.status != nullptr && lane == 0) {
    batch.status[kStatusCode] = static_cast<int64_t>(verdict.error);
    batch.status[kStatusRequest] = verdict.request;
    batch.status[kStatusIndex] = verdict.index;
    batch.status[kStatusValue] = verdict.value;
    batch.status[kStatusCommitted] = num_tokens;
    for (int word = kStatusCommitted + 1; word < kNumStatusWords; ++word) batch.status[word] = 0;
  }
  const int64_t open = __shfl_sync(0xffffffff, counter, kCounterOpenTokens);
  const int error = __shfl_sync(0xffffffff, static_cast<int>(verdict.error), 0);
  if (batch.counters != nullptr && lane < kNumCommitCounters) {
    batch.counters[lane] = CounterAfter(
        static_cast<int>(lane), counter, open,
        {static_cast<CommitError>(error), num_tokens, batch.bytes_per_token, batch.closing_tokens});
  }
}

// Leaves nothing of the round behind. One warp of the grid, after the fault has been described.
// Others may still read round_status: a round without a fault has none to clear.
__device__ inline void ClearRound(const BatchTable& batch, bool ok, uint32_t lane) {
  __syncwarp();
  if (!ok && batch.round_status != nullptr && lane < kNumStatusWords) batch.round_status[lane] = 0;
  if (batch.tips == nullptr) return;
  const int32_t num_requests = batch.num_positions / batch.positions_per_request;
#pragma unroll 1
  for (int32_t request = static_cast<int32_t>(lane); request < num_requests; request += 32) {
    batch.tips[request] = -1;
  }
}

// Tells the host and the next chunk. One warp of the grid, once it may (PublishesNow). `counter`:
// its lanes'.
__device__ inline void Publish(const BatchTable& batch, const BatchVerdict& found,
                               int64_t counter) {
  const uint32_t lane = threadIdx.x % 32;
  const bool ok = found.fault == kNoFault;
  CommitVerdict verdict;
  if (!ok && lane == 0) verdict = Describe(batch, found.fault);
  WriteStatus(batch, verdict, ok ? found.num_accepted : 0, counter);
  if (batch.closing_tokens >= 0) return ClearRound(batch, ok, lane);
  if (batch.tips == nullptr || !ok) return;
  const int32_t num_requests = batch.num_positions / batch.positions_per_request;
#pragma unroll 1
  for (int32_t request = static_cast<int32_t>(lane); request < num_requests; request += 32) {
    const int32_t count = batch.counts[request];
    if (count > 0) {
      const int32_t last = batch.path[request * batch.depth + count - 1];
      batch.tips[request] = StagingRow(batch, request, last);
    }
  }
}

// The same where there are compact views to tell of.
template <typename Tail>
__device__ void Announce(const BatchTable& batch, const Tail& tail, const BatchVerdict& found,
                         int64_t counter) {
  if constexpr (std::is_same_v<Tail, NoTail>) {
    Publish(batch, found, counter);
  } else if (IsTailFault(found.fault)) {
    const uint32_t lane = threadIdx.x % 32;
    CommitVerdict verdict;
    if (lane == 0) verdict = DescribeTailFault(batch, tail, found.fault);
    WriteStatus(batch, verdict, 0, counter);
    if (batch.closing_tokens >= 0) ClearRound(batch, /*ok=*/false, lane);
  } else {
    Publish(batch, found, counter);
    if (found.fault == kNoFault) PublishHeld(batch, tail);
  }
}

}  // namespace nwor
