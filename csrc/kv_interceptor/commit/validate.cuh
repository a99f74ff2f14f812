#pragma once

#include <cstdint>
#include <type_traits>

#include "kv_interceptor/commit/error.h"
#include "kv_interceptor/commit/grid.h"
#include "kv_interceptor/commit/table.cuh"
#include "kv_interceptor/commit/tail.cuh"

// The checks of a commit, done by every block on the whole batch. A fault is one number that orders
// as the host validation meets faults: by request, then index, then check. All blocks see the same
// inputs and take the minimum, so they agree without talking.

namespace nwor {

enum FaultCheck : uint32_t {
  kCheckCount = 0,
  kCheckPath = 1,
  kCheckChain = 2,
  kCheckSlots = 3,  // + 2 * group for the range, one more for a duplicate
};
inline constexpr uint32_t kFaultBits = 8;
inline constexpr uint32_t kRoundFault = 0;
inline constexpr uint32_t kAgreementFault = 1;
inline constexpr uint32_t kNoFault = 0xffffffff;
// Room in compact views is a fault of a request, found at its first entry: it orders before those
// of its path but after its count, in the upper half of the checks of the position before.
inline constexpr uint32_t kCheckRoom = 0xfe, kCheckRoot = 0xff;
static_assert(kCheckSlots + 2 * kMaxCommitGroups < kCheckRoom);

__device__ inline uint32_t FaultAt(int32_t position, uint32_t check) {
  return (static_cast<uint32_t>(position) + 1) << kFaultBits | check;
}

// An empty cell belongs to no group. Cells of earlier groups count as empty: they are overwritten.
inline constexpr uint32_t kEmptyCell = 0xffffffff;

// Notes that `position` writes to `slot`. Returns kNoFault, or a position whose slot an earlier
// position has too. Of three with one slot all but the first are returned, each by the thread that
// displaced it or found it smaller, whatever the order of arrival: the minimum is the same always.
__device__ inline uint32_t InsertSlot(uint32_t* cells, const BatchTable& batch, uint32_t group_idx,
                                      int32_t position, int64_t slot) {
  const GroupTable& group = batch.groups[group_idx];
  const uint32_t word = group_idx << 16 | static_cast<uint32_t>(position);
  const auto hash =
      static_cast<uint32_t>((static_cast<uint64_t>(slot) * 0x9e3779b97f4a7c15ULL) >> 32);
  uint32_t at = __umulhi(hash, static_cast<uint32_t>(batch.num_cells));
  while (true) {
    uint32_t seen = atomicCAS(&cells[at], kEmptyCell, word);
    if (seen == kEmptyCell) return kNoFault;
    if (seen >> 16 != group_idx) {
      const uint32_t old = atomicCAS(&cells[at], seen, word);
      if (old == seen) return kNoFault;
      seen = old;
    }
    const auto other = static_cast<int32_t>(seen & 0xffff);
    int32_t other_row = 0;
    if (group.slots == nullptr) {
      const Entry entry = LoadEntry(batch, other);
      other_row = StagingRow(batch, entry.request, entry.path_entry);
    }
    if (DestinationSlot(group, other, other_row) == slot) {
      return max(atomicMin(&cells[at], word), word) & 0xffff;
    }
    at = at + 1 == static_cast<uint32_t>(batch.num_cells) ? 0 : at + 1;
  }
}

__device__ inline uint32_t CheckRound(const BatchTable& batch) {
  if (batch.round_status != nullptr && batch.round_status[kStatusCode] != 0) return kRoundFault;
  // Words are max(digest) and max(~digest) = ~min(digest) over the ranks.
  if (batch.agreement != nullptr && batch.agreement[0] != ~batch.agreement[1]) {
    return kAgreementFault;
  }
  return kNoFault;
}

// Room for a request's rows in its compact view, and the slot of the row that is not staged.
__device__ inline uint32_t CheckTail(const BatchTable& batch, const TailTable& tail,
                                     const TailEntry& in_view, const Entry& entry,
                                     int32_t position) {
  if (in_view.begin < 0) return kNoFault;
  if (in_view.End(entry.count) > static_cast<uint32_t>(tail.params.capacity)) {
    return FaultAt(position - 1, kCheckRoom);
  }
  if (in_view.root_slot >= batch.groups[0].pages.num_slots) {
    return FaultAt(position - 1, kCheckRoot);
  }
  return kNoFault;
}

// Where accepted entries come from and go to in one group.
template <int kCount>
struct EntryPlaces {
  int32_t rows[kCount];   // of staging; < 0: its path names none, or it was not accepted
  int64_t slots[kCount];  // where there is a row
};

// Finds them for a thread's entries, all at once, and what is wrong with each by itself. Returns
// the lowest fault. kHasBefore: their path_before has been loaded.
template <bool kHasBefore, int kCount>
__device__ inline uint32_t PlaceEntries(const BatchTable& batch, int g,
                                        const Entry (&entries)[kCount],
                                        const int32_t (&positions)[kCount],
                                        const bool (&accepted)[kCount],
                                        EntryPlaces<kCount>& places) {
  const GroupTable& group = batch.groups[g];
  int32_t requests[2 * kCount], names[2 * kCount], rows[2 * kCount];  // the rows before come last
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const Entry& entry = entries[i];
    const bool follows = accepted[i] && entry.index > 0;
    requests[i] = requests[kCount + i] = entry.request;
    names[i] = accepted[i] ? entry.path_entry : -1;
    names[kCount + i] = !follows     ? -1
                        : kHasBefore ? entry.path_before
                                     : batch.path[positions[i] - 1];
  }
  FindStagingRows(batch, requests, names, rows);
  int32_t previous[kCount], parents[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    places.rows[i] = rows[i];
    previous[i] = rows[kCount + i];
    places.slots[i] = entries[i].slot;
  }
  if (g > 0 || group.slots == nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (rows[i] >= 0) places.slots[i] = DestinationSlot(group, positions[i], rows[i]);
    }
  }
  if (batch.tips != nullptr) {  // of an earlier chunk
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (rows[i] >= 0 && entries[i].index == 0) previous[i] = batch.tips[entries[i].request];
    }
  }
  if (batch.parents != nullptr) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) parents[i] = rows[i] >= 0 ? batch.parents[rows[i]] : 0;
  }
  uint32_t fault = kNoFault;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const bool linked =
        batch.parents == nullptr ? rows[i] > previous[i] : parents[i] == previous[i];
    const bool in_range = places.slots[i] >= 0 && places.slots[i] < group.pages.num_slots;
    if (accepted[i] && rows[i] < 0) {
      fault = min(fault, FaultAt(positions[i], kCheckPath));
    } else if (accepted[i] && !linked) {
      fault = min(fault, FaultAt(positions[i], kCheckChain));
    } else if (accepted[i] && !in_range) {
      fault = min(fault, FaultAt(positions[i], kCheckSlots + 2 * g));
    }
  }
  return fault;
}

// The share of one thread of those that move rows; the minimum over the block is the verdict.
// `first` is the entry of the thread's own number, already on its way. Adds accepted entries to
// `num_accepted`. All these threads must call it, after the cells are empty.
template <typename Tail>
__device__ inline uint32_t CheckShare(const BatchTable& batch, const Tail& tail, uint32_t* cells,
                                      const Entry& first, int32_t& num_accepted) {
  constexpr bool kViews = !std::is_same_v<Tail, NoTail>;
  const auto rank = static_cast<int32_t>(threadIdx.x);
  uint32_t fault = CheckRound(batch);
#pragma unroll 1
  for (int g = 0; g < batch.num_groups; ++g) {
    if (g > 0) __syncthreads();  // cells of the group before are no longer needed
#pragma unroll 1
    for (int32_t position = rank; position < batch.num_positions; position += kCommitThreads) {
      const Entry entries[] = {position == rank ? first : LoadEntry(batch, position)};
      const Entry& entry = entries[0];
      [[maybe_unused]] TailEntry in_view;
      if constexpr (kViews) in_view = tail.Load(entry.request);
      if (!entry.count_valid(batch)) {
        if (entry.index == 0) fault = min(fault, FaultAt(position, kCheckCount));
      } else if (entry.index < entry.count) {
        num_accepted += g == 0;
        const int32_t positions[] = {position};
        const bool accepted[] = {true};
        EntryPlaces<1> places;
        fault = min(fault, PlaceEntries</*kHasBefore=*/false>(batch, g, entries, positions,
                                                              accepted, places));
        if (places.rows[0] >= 0) {
          const uint32_t again = InsertSlot(cells, batch, g, position, places.slots[0]);
          if (again != kNoFault) {
            fault = min(fault, FaultAt(static_cast<int32_t>(again), kCheckSlots + 2 * g + 1));
          }
        }
      }
      if constexpr (kViews) {
        if (entry.index == 0 && entry.count_valid(batch)) {
          fault = min(fault, CheckTail(batch, tail, in_view, entry, position));
        }
      }
    }
  }
  return fault;
}

__device__ inline void ClearCells(const BatchTable& batch, uint32_t* cells) {
#pragma unroll 1
  for (auto i = static_cast<int32_t>(threadIdx.x); i < batch.num_cells; i += kCommitThreads) {
    cells[i] = kEmptyCell;
  }
}

// Whether a fault is one of compact views, and its words.
__device__ inline bool IsTailFault(uint32_t fault) {
  return fault != kNoFault && (fault & ((1u << kFaultBits) - 1)) >= kCheckRoom;
}
__device__ inline CommitVerdict DescribeTailFault(const BatchTable& batch, const TailTable& tail,
                                                  uint32_t fault) {
  const Entry entry = LoadEntry(batch, static_cast<int32_t>(fault >> kFaultBits));
  if ((fault & 1) == (kCheckRoot & 1)) {
    return {CommitError::kSlotRange, entry.request, 0, tail.params.root_slots[entry.request]};
  }
  return {CommitError::kTailFull, entry.request, 0, tail.Load(entry.request).End(entry.count)};
}

// The words of a fault for status. One thread calls it, after the verdict. REQUIRES: there is one.
__device__ __noinline__ CommitVerdict Describe(const BatchTable& batch, uint32_t fault) {
  if (fault == kRoundFault) {
    return {static_cast<CommitError>(batch.round_status[kStatusCode]),
            batch.round_status[kStatusRequest], batch.round_status[kStatusIndex],
            batch.round_status[kStatusValue]};
  }
  if (fault == kAgreementFault) {
    return {CommitError::kRankDisagreement, 0, 0, batch.agreement[0]};
  }
  const auto position = static_cast<int32_t>((fault >> kFaultBits) - 1);
  const uint32_t check = fault & ((1u << kFaultBits) - 1);
  const Entry entry = LoadEntry(batch, position);
  if (check == kCheckCount) return {CommitError::kCountRange, entry.request, 0, entry.count};
  if (check == kCheckPath || check == kCheckChain) {
    return {check == kCheckPath ? CommitError::kPathRange : CommitError::kNotAChain, entry.request,
            entry.index, entry.path_entry};
  }
  const int32_t row = StagingRow(batch, entry.request, entry.path_entry);
  const int64_t slot = DestinationSlot(batch.groups[(check - kCheckSlots) / 2], position, row);
  return {(check - kCheckSlots) % 2 == 0 ? CommitError::kSlotRange : CommitError::kDuplicateSlot,
          entry.request, entry.index, slot};
}

}  // namespace nwor
