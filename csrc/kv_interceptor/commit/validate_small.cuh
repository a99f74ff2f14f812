#pragma once

#include <cstdint>
#include <type_traits>

#include "kv_interceptor/commit/grid.h"
#include "kv_interceptor/commit/table.cuh"
#include "kv_interceptor/commit/tail.cuh"
#include "kv_interceptor/commit/validate.cuh"
#include "kv_interceptor/commit/verdict.cuh"

// The checks of a small commit, by one warp beside those that move rows. These are soon ready and
// wait for it, so it asks for all that its entries need at once, and compares slots with each other
// instead of looking them up: no step waits for what another thread did but one.

namespace nwor {

inline constexpr int kEntriesPerLane = kSmallCommitEntries / 32;
static_assert(kEntriesPerLane == 2);

// The lower words of all slots, in shared memory: a ring, in which an entry is compared with those
// of the half that follows it.
class SmallSlots {
 public:
  // Whether two of the warp's slots may be the same.
  __device__ bool MayRepeat(const int64_t (&slots)[kEntriesPerLane], int32_t num_positions) {
    const uint32_t lane = threadIdx.x % 32;
    const auto first = static_cast<uint32_t>(slots[0]);
    const auto second = num_positions > 32 ? static_cast<uint32_t>(slots[1]) : first;
    __syncwarp();  // those of the group before have been read
    words_[lane] = first;
    words_[32 + lane] = second;
    words_[64 + lane] = first;
    __syncwarp();
    bool repeats = false;
    if (num_positions > 32) {
#pragma unroll
      for (int next = 1; next <= 32; ++next) {
        repeats |= words_[lane + next] == first;
        repeats |= words_[32 + lane + next] == second;
      }
    } else {
#pragma unroll
      for (int next = 1; next <= 16; ++next) repeats |= words_[lane + next] == first;
    }
    return __any_sync(0xffffffff, repeats);
  }

 private:
  uint32_t words_[3 * 32];
};

// The lowest fault of the lane's entries whose slot an earlier entry has.
__device__ inline uint32_t FindRepeated(const int64_t (&slots)[kEntriesPerLane],
                                        const int32_t (&positions)[kEntriesPerLane], int g,
                                        int32_t num_positions) {
  uint32_t fault = kNoFault;
#pragma unroll 1
  for (int32_t other = 0; other < num_positions; ++other) {
    const int64_t slot = __shfl_sync(0xffffffff, other < 32 ? slots[0] : slots[1], other % 32);
#pragma unroll
    for (int i = 0; i < kEntriesPerLane; ++i) {
      if (slots[i] == slot && other < positions[i]) {
        fault = min(fault, FaultAt(positions[i], kCheckSlots + 2 * g + 1));
      }
    }
  }
  return fault;
}

// A lane's entries: its own number, and every 32nd from there.
struct LaneEntries {
  Entry entries[kEntriesPerLane];
  int32_t positions[kEntriesPerLane];

  // Nobody waits for them here.
  __device__ explicit LaneEntries(const BatchTable& batch) {
#pragma unroll
    for (int i = 0; i < kEntriesPerLane; ++i) {
      positions[i] = static_cast<int32_t>(threadIdx.x % 32) + i * 32;
      entries[i] = LoadEntry(batch, positions[i]);
    }
  }
};

// The verdict, the same in all lanes of the warp.
template <typename Tail>
__device__ inline BatchVerdict CheckSmallBatch(const BatchTable& batch, const Tail& tail,
                                               SmallSlots& shared, const LaneEntries& lane) {
  constexpr bool kViews = !std::is_same_v<Tail, NoTail>;
  uint32_t fault = CheckRound(batch);
  int32_t num_accepted = 0;
  bool accepted[kEntriesPerLane];
#pragma unroll
  for (int i = 0; i < kEntriesPerLane; ++i) {
    const Entry& entry = lane.entries[i];
    const bool begins = lane.positions[i] < batch.num_positions && entry.index == 0;
    accepted[i] = entry.count_valid(batch) && entry.index < entry.count;
    num_accepted += accepted[i] ? 1 : 0;
    if (!begins) continue;
    if (!entry.count_valid(batch)) {
      fault = min(fault, FaultAt(lane.positions[i], kCheckCount));
    } else if constexpr (kViews) {
      const TailEntry in_view = tail.Load(entry.request);
      fault = min(fault, CheckTail(batch, tail, in_view, entry, lane.positions[i]));
    }
  }
  const auto check_group = [&](int g) {
    EntryPlaces<kEntriesPerLane> places;
    fault = min(fault, PlaceEntries</*kHasBefore=*/true>(batch, g, lane.entries, lane.positions,
                                                         accepted, places));
#pragma unroll
    for (int i = 0; i < kEntriesPerLane; ++i) {
      // Without a slot: unlike each other. A slot like it is out of range, and that fault comes
      // first.
      if (places.rows[i] < 0) places.slots[i] = -1 - lane.positions[i];
    }
    if (shared.MayRepeat(places.slots, batch.num_positions)) {
      fault = min(fault, FindRepeated(places.slots, lane.positions, g, batch.num_positions));
    }
  };
  check_group(0);  // known here: what is read of it are then operands of instructions
#pragma unroll 1
  for (int g = 1; g < batch.num_groups; ++g) check_group(g);
  return {__reduce_min_sync(0xffffffff, fault),
          static_cast<int32_t>(__reduce_add_sync(0xffffffff, num_accepted))};
}

}  // namespace nwor
