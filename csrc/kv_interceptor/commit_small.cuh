#pragma once

#include <cstdint>

#include "kv_interceptor/commit_table.cuh"
#include "kv_interceptor/commit_validate.cuh"

// A batch small enough for the registers of one warp: every warp validates it by itself, so a
// commit needs neither shared memory nor a barrier, and its latency is that of its loads.

namespace nwor {

inline constexpr int kSmallEntriesPerLane = 2;
inline constexpr int kSmallCommitEntries = 32 * kSmallEntriesPerLane;

class WarpBatch {
 public:
  // Entry i lies with lane i % 32. All loads are on their way when it returns.
  __device__ explicit WarpBatch(const BatchTable& batch) : lane_(threadIdx.x % 32) {
#pragma unroll
    for (int k = 0; k < kSmallEntriesPerLane; ++k) {
      entries_[k] = LoadEntry(batch, Position(k));
      slots_[k] = LoadSlot(batch.groups[0], batch, Position(k));
    }
#pragma unroll
    for (int k = 0; k < kSmallEntriesPerLane; ++k) {
      const Entry& entry = entries_[k];
      accepted_[k] = Position(k) < batch.num_positions && entry.count_valid(batch) &&
                     entry.index < entry.count;
      rows_[k] = accepted_[k] ? StagingRow(batch, entry.request, entry.path_entry) : -1;
    }
  }

  // The staging row and destination of an entry; every lane of the warp asks for the same one.
  __device__ int32_t Row(int32_t position) const { return Pick(rows_, position); }
  __device__ int64_t Slot(const GroupTable& group, int32_t position, int32_t row) const {
    return row < 0 ? -1 : DestinationSlot(group, position, row);
  }

  __device__ int32_t NumAccepted() const {
    int32_t count = 0;
#pragma unroll
    for (int k = 0; k < kSmallEntriesPerLane; ++k) count += accepted_[k];
    return __reduce_add_sync(0xffffffff, count);
  }

  // The first fault of the batch, as CheckShare finds it.
  __device__ uint32_t Validate(const BatchTable& batch) const {
    uint32_t fault = CheckRound(batch);
#pragma unroll
    for (int k = 0; k < kSmallEntriesPerLane; ++k) {
      const Entry& entry = entries_[k];
      const int32_t before = Row(max(Position(k) - 1, 0));
      if (Position(k) < batch.num_positions && !entry.count_valid(batch) && entry.index == 0) {
        fault = min(fault, FaultAt(Position(k), kCheckCount));
      }
      if (!accepted_[k]) continue;
      if (rows_[k] < 0) {
        fault = min(fault, FaultAt(Position(k), kCheckPath));
      } else if (!Linked(batch, entry, before, rows_[k])) {
        fault = min(fault, FaultAt(Position(k), kCheckChain));
      }
    }
#pragma unroll 1
    for (int g = 0; g < batch.num_groups; ++g) fault = min(fault, CheckSlots(batch, g));
    return __reduce_min_sync(0xffffffff, fault);
  }

 private:
  __device__ int32_t Position(int k) const { return lane_ + 32 * k; }

  template <typename T>
  __device__ T Pick(const T (&values)[kSmallEntriesPerLane], int32_t position) const {
    const T low = __shfl_sync(0xffffffff, values[0], position % 32);
    const T high = __shfl_sync(0xffffffff, values[1], position % 32);
    return position < 32 ? low : high;
  }

  // Loaded before anything is known of the entry.
  __device__ static int64_t LoadSlot(const GroupTable& group, const BatchTable& batch,
                                     int32_t position) {
    return group.slots != nullptr && position < batch.num_positions && batch.depth > 0
               ? group.slots[position]
               : -1;
  }

  __device__ uint32_t CheckSlots(const BatchTable& batch, int g) const {
    const GroupTable& group = batch.groups[g];
    uint32_t fault = kNoFault;
    int64_t keys[kSmallEntriesPerLane];
#pragma unroll
    for (int k = 0; k < kSmallEntriesPerLane; ++k) {
      // What is not written anywhere is equal to nothing.
      keys[k] = -1 - Position(k);
      if (!accepted_[k] || rows_[k] < 0) continue;
      const bool loaded = g == 0 && group.slots != nullptr;
      const int64_t slot = loaded ? slots_[k] : DestinationSlot(group, Position(k), rows_[k]);
      if (slot < 0 || slot >= group.pages.num_slots) {
        fault = min(fault, FaultAt(Position(k), kCheckSlots + 2 * g));
      } else {
        keys[k] = slot;
      }
    }
    const uint32_t lanes_before = (1u << lane_) - 1;
#pragma unroll
    for (int k = 0; k < kSmallEntriesPerLane; ++k) {
      const uint32_t same = __match_any_sync(0xffffffff, static_cast<unsigned long long>(keys[k]));
      if ((same & lanes_before) != 0) {
        fault = min(fault, FaultAt(Position(k), kCheckSlots + 2 * g + 1));
      }
    }
    if (batch.num_positions > 32) {
#pragma unroll 4
      for (int turn = 0; turn < 32; ++turn) {
        if (__shfl_sync(0xffffffff, keys[0], lane_ + turn) == keys[1]) {
          fault = min(fault, FaultAt(Position(1), kCheckSlots + 2 * g + 1));
        }
      }
    }
    return fault;
  }

  int32_t lane_;
  Entry entries_[kSmallEntriesPerLane];
  int64_t slots_[kSmallEntriesPerLane];  // of group 0, when it has destinations
  int32_t rows_[kSmallEntriesPerLane];
  bool accepted_[kSmallEntriesPerLane];
};

}  // namespace nwor
