#pragma once

#include <cstdint>
#include <type_traits>

#include "kv_interceptor/commit_error.h"
#include "kv_interceptor/commit_grid.h"
#include "kv_interceptor/commit_table.cuh"
#include "kv_interceptor/commit_tail.cuh"

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

// True when `before`, the row before this entry on its path, or the tip of an earlier chunk is its
// parent.
__device__ inline bool Linked(const BatchTable& batch, const Entry& entry, int32_t before,
                              int32_t row) {
  int32_t previous = -1;
  if (entry.index > 0) {
    previous = before;
  } else if (batch.tips != nullptr) {
    previous = batch.tips[entry.request];
  }
  return batch.parents == nullptr ? row > previous : batch.parents[row] == previous;
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
  const int32_t first = in_view.FirstRow();
  if (first < 0) return kNoFault;
  if (int64_t{first} + entry.count > tail.params.capacity) {
    return FaultAt(position - 1, kCheckRoom);
  }
  if (in_view.root_slot >= batch.groups[0].pages.num_slots) {
    return FaultAt(position - 1, kCheckRoot);
  }
  return kNoFault;
}

// Faults of one entry in one group, lowest first. kHasBefore: its path_before has been loaded.
template <bool kHasBefore>
__device__ uint32_t CheckEntry(const BatchTable& batch, int g, uint32_t* cells, const Entry& entry,
                               int32_t position) {
  const GroupTable& group = batch.groups[g];
  const int32_t row = StagingRow(batch, entry.request, entry.path_entry);
  if (row < 0) return FaultAt(position, kCheckPath);
  const bool loaded = g == 0 && group.slots != nullptr;
  const int64_t slot = loaded ? entry.slot : DestinationSlot(group, position, row);
  int32_t before = -1;
  if (entry.index > 0) {
    const int32_t path_before = kHasBefore ? entry.path_before : batch.path[position - 1];
    before = StagingRow(batch, entry.request, path_before);
  }
  uint32_t fault = Linked(batch, entry, before, row) ? kNoFault : FaultAt(position, kCheckChain);
  if (slot < 0 || slot >= group.pages.num_slots) {
    fault = min(fault, FaultAt(position, kCheckSlots + 2 * g));
  }
  const uint32_t again = InsertSlot(cells, batch, g, position, slot);
  if (again != kNoFault) {
    fault = min(fault, FaultAt(static_cast<int32_t>(again), kCheckSlots + 2 * g + 1));
  }
  return fault;
}

// Threads that validate a batch together: all that move rows, or one warp beside them. They sync
// only between groups; a block with more threads than BlockTeam has but one (see LaunchCommit).
// kLooksAhead: the next entry is on its way while one is checked. Threads that move rows have no
// registers for it.
struct BlockTeam {
  static constexpr int32_t kStride = kCommitThreads;
  static constexpr bool kLooksAhead = false;
  __device__ static uint32_t Rank() { return threadIdx.x; }
  __device__ static void Sync() { __syncthreads(); }
};
struct WarpTeam {
  static constexpr int32_t kStride = 32;
  static constexpr bool kLooksAhead = true;
  __device__ static uint32_t Rank() { return threadIdx.x % 32; }
  __device__ static void Sync() { __syncwarp(); }
};

// The share of one thread; the minimum over the team is the verdict. `first` is the entry of the
// thread's own rank, already on its way. Adds accepted entries to `num_accepted`. All threads of
// the team must call it, after the cells are empty.
template <typename Team, typename Tail>
__device__ inline uint32_t CheckShare(const BatchTable& batch, const Tail& tail, uint32_t* cells,
                                      const Entry& first, int32_t& num_accepted) {
  constexpr bool kViews = !std::is_same_v<Tail, NoTail>;
  const auto rank = static_cast<int32_t>(Team::Rank());
  uint32_t fault = CheckRound(batch);
#pragma unroll 1
  for (int g = 0; g < batch.num_groups; ++g) {
    if (g > 0) Team::Sync();  // cells of the group before are no longer needed
    [[maybe_unused]] Entry next = first;
#pragma unroll 1
    for (int32_t position = rank; position < batch.num_positions; position += Team::kStride) {
      Entry entry;
      if constexpr (Team::kLooksAhead) {
        entry = next;
        next = LoadEntry(batch, position + Team::kStride);
      } else {
        entry = position == rank ? first : LoadEntry(batch, position);
      }
      [[maybe_unused]] TailEntry in_view;
      if constexpr (kViews) in_view = tail.Load(entry.request);
      if (!entry.count_valid(batch)) {
        if (entry.index == 0) fault = min(fault, FaultAt(position, kCheckCount));
      } else if (entry.index < entry.count) {
        num_accepted += g == 0;
        fault = min(fault, CheckEntry<Team::kLooksAhead>(batch, g, cells, entry, position));
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

template <typename Team>
__device__ inline void ClearCells(const BatchTable& batch, uint32_t* cells) {
#pragma unroll 1
  for (int32_t i = static_cast<int32_t>(Team::Rank()); i < batch.num_cells; i += Team::kStride) {
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
    return {CommitError::kSlotRange, entry.request, 0, tail.params.RootSlot(entry.request)};
  }
  return {CommitError::kTailFull, entry.request, 0,
          int64_t{tail.Load(entry.request).FirstRow()} + entry.count};
}

// The words of a fault for status. One thread calls it, after the verdict.
__device__ __noinline__ CommitVerdict Describe(const BatchTable& batch, uint32_t fault) {
  if (fault == kNoFault) return {};
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
