#pragma once

#include "attention/cuda/fold.cuh"

// The combine of all partial results, once all items are done: CTAs that find no further item share
// it, by tickets. What such a CTA waits for is never held by a CTA that does not run: the others
// have all taken their first items, or it gets no ticket; the one that ends last always gets one.
// A Traits type here has Row, kHeadDim, kThreads, kTwoRows, kSplitQuads and Meet, a barrier for the
// CTA's kThreads first threads.

namespace nwor {

inline constexpr uint32_t kNoTicket = 0xffffffffu;

// Shared memory for the combine.
struct CombineBuffer {
  uint32_t address;
  int bytes;
};

// A row of a pair's partial results as a warp has it, or two of them: tile kernels (kTwoRows) keep
// rows r and r + 8 together, in quads of two values of each, or one row in quads of channels c, c +
// 1, c + 8 and c + 9 (kSplitQuads). All lanes have the states, a lane the quads lane, lane + 32,
// ...
template <class Traits>
struct CombinedRows {
  static constexpr int kRows = Traits::kTwoRows ? 2 : 1;
  static constexpr int kChannels = 4 / kRows;  // of a quad and row
  static constexpr int kRowQuads = Traits::kHeadDim / kChannels;
  static constexpr int kQuads = (kRowQuads + 31) / 32;
  float4 output[kQuads];
  float2 state[kRows];

  // The first row of the index-th such rows; how many there are in a slot of `tile` rows.
  __device__ static int Row(int index) { return kRows == 1 ? index : index / 8 * 16 + index % 8; }
  __device__ static int Count(int tile) { return tile / kRows; }
  // Of this lane's i-th quad: whether there is one, the channel of a row's c-th value (0 or 2), its
  // place in a slot.
  __device__ static int Quad(int i) { return i * 32 + static_cast<int>(threadIdx.x % 32); }
  __device__ static bool Has(int i) { return kRowQuads % 32 == 0 || Quad(i) < kRowQuads; }
  __device__ static int Channel(int i, int c) {
    if constexpr (Traits::kSplitQuads) return Quad(i) / 4 * 16 + Quad(i) % 4 * 2 + c * 4;
    return kRows == 1 ? Quad(i) * 4 + c : Quad(i) / 4 * 8 + Quad(i) % 4 * 2;
  }
  __device__ static int Place(int i, int row) {
    return (kRows == 1 ? row : row / 16 * 8 + row % 8) * kRowQuads + Quad(i);
  }

  // Folds a later result in; `weight` is what FoldState gives for the states.
  __device__ void FoldOutputs(const CombinedRows& later, const float2 (&weight)[kRows]) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      output[i] = FoldRows(output[i], later.output[i], weight[0], weight[kRows - 1]);
    }
  }
  __device__ void Fold(const CombinedRows& later) {
    float2 weight[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) weight[r] = FoldState(&state[r], later.state[r]);
    FoldOutputs(later, weight);
  }

  __device__ void Write(const VerifyArgs& args, const PlanItem& item, int row) const {
    using T = typename Traits::Row;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int at_row = row + 8 * r;
      if (at_row >= item.num_rows) break;
      const OutputRow at = LocateRow(args, item, at_row);
      const RowStrides strides = args.params.out_strides;
      const float factor = InverseSum(state[r].y);
      T* out = static_cast<T*>(args.params.out) + at.row * strides.row + at.head * strides.head;
#pragma unroll
      for (int i = 0; i < kQuads; ++i) {
        if (!Has(i)) break;
        const float values[4] = {output[i].x, output[i].y, output[i].z, output[i].w};
#pragma unroll
        for (int c = 0; c < kChannels; c += 2) {
          *reinterpret_cast<uint32_t*>(out + Channel(i, c)) = ptx::Pack<T>(
              values[r * kChannels + c] * factor, values[r * kChannels + c + 1] * factor);
        }
      }
      if (threadIdx.x % 32 == 0) WriteLse(args, item, at_row, state[r]);
    }
  }
};

// What a part's states do to the fold of its group, of one row: its weights (old, new), the maximum
// then, and its sum as it comes in.
struct PartWeight {
  float old, part;
  float max, sum;

  // A lane has the state of a part and its place in its group, of which the lanes before have the
  // parts before. Called by a whole warp.
  __device__ static PartWeight Of(float2 state, int place) {
    float max = state.x;
#pragma unroll
    for (int distance = 1; distance < kMaxGroupLeaves; distance *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, max, distance);
      if (place >= distance) max = fmaxf(other, max);
    }
    const float before = __shfl_up_sync(0xffffffffu, max, 1);
    if (place == 0) return {0.0f, 1.0f, max, state.y};
    const float weight = StateWeight(state.x, max);
    return {StateWeight(before, max), weight, max, __fmul_rn(state.y, weight)};
  }
};
static_assert(sizeof(PartWeight) == sizeof(uint4));

// How a CTA combines a unit: so many entries (CombinedRows) of a pair. Few pairs have small units,
// so that all CTAs that have worked take part: then a team of warps shares an entry, its members
// fold groups of parts, its first one the groups. Many have large ones: then a warp has several
// entries, whose parts are under way together, as many as there is room for.
template <class Traits>
struct CombineTeams {
  using Rows = CombinedRows<Traits>;
  static constexpr int kWarps = Traits::kThreads / 32;
  static constexpr int kPartBytes = CombinePartBytes(Traits::kHeadDim, Rows::kRows);
  static constexpr int kStateBytes = CombineStateBytes(Rows::kRows);  // of all parts under way
  static constexpr int kWeightBytes = CombineWeightBytes(Rows::kRows);
  static constexpr int kMinWarpBytes =
      CombineWarpBytes(Traits::kHeadDim, Rows::kRows, kMaxGroupLeaves);
  static constexpr int kFoldedBytes = kMaxGroups * (kPartBytes + 8 * Rows::kRows);  // of an entry
  static_assert(kPartBytes == 512 * Rows::kQuads &&
                kWeightBytes == 32 * Rows::kRows * sizeof(PartWeight));

  int entries;  // of a unit: a power of two
  int units_per_pair;

  __device__ CombineTeams(const VerifyArgs& args, const LaunchCounts& counts, int buffer_bytes) {
    const int all = Rows::Count(args.row_tile);
    const int entry_bytes = kStateBytes + counts.max_parts * kPartBytes;
    const int64_t ctas = min(counts.num_items, static_cast<int>(gridDim.x));
    // A team needs room for its groups. Beyond an entry for each warp, of which every row tile has
    // enough, units grow only while all parts of one fit at once.
    for (entries = 1; entries < all; entries *= 2) {
      const bool has_room =
          entries >= kWarps || entries * kFoldedBytes + kWarps * kMinWarpBytes <= buffer_bytes;
      if (has_room && int64_t{counts.num_split_pairs} * (all / entries) <= ctas) break;
      const int twice = kWarps * kWeightBytes + 2 * entries * entry_bytes;
      if (entries >= kWarps && twice > buffer_bytes) break;
    }
    units_per_pair = all / entries;
  }
  __device__ int team_warps() const { return entries < kWarps ? kWarps / entries : 1; }
  __device__ int warp_entries() const { return entries < kWarps ? 1 : entries / kWarps; }
};

// One warp's share of a unit. As many of its loads as there is room for are under way at once, and
// nothing that is waited for stands before them: ptxas waits for a load at the head of the next
// loop, used there or not.
template <class Traits>
class UnitCombiner {
  using Rows = CombinedRows<Traits>;
  using Teams = CombineTeams<Traits>;
  static constexpr int kRows = Rows::kRows;

 public:
  // `item` is the first of the pair's, `unit` counts the pair's units.
  __device__ UnitCombiner(const VerifyArgs& args, const PlanItem& item, int unit,
                          const Teams& teams, const CombineBuffer& buffer)
      : args_(args), item_(item), team_(teams.team_warps()), entries_(teams.warp_entries()) {
    const int warp = threadIdx.x / 32;
    const int entry = warp / team_;
    member_ = warp % team_;
    first_ = unit * teams.entries + entry * entries_;
    group_parts_ = LeafGroup(item.num_leaves) / item.leaves_per_part();
    num_groups_ = (item.num_parts + group_parts_ - 1) / group_parts_;
    const int folded = team_ > 1 ? teams.entries * Teams::kFoldedBytes : 0;
    const int mine = (buffer.bytes - folded) / Teams::kWarps / 16 * 16;
    folded_ = buffer.address + entry * Teams::kFoldedBytes;
    weights_ = buffer.address + folded + warp * mine;
    parts_ = weights_ + Teams::kWeightBytes;
    const int room = mine - Teams::kWeightBytes;
    entry_bytes_ = Teams::kStateBytes + item.num_parts * Teams::kPartBytes;
    at_once_ = item.num_parts > 32 ? 0 : min(room / entry_bytes_, entries_);
    groups_at_once_ = num_groups_;
    if (at_once_ == 0) {  // not even one entry's parts
      at_once_ = 1;
      groups_at_once_ = min((room - Teams::kStateBytes) / Teams::kPartBytes, 32) / group_parts_;
    }
    index_ = lane() / group_parts_;
    place_ = lane() - index_ * group_parts_;
  }

  // Calls meanwhile() when the first parts are under way. Alone in its team the warp writes its
  // rows, else it leaves its groups in shared memory.
  template <typename Meanwhile>
  __device__ void FoldEntries(Meanwhile meanwhile) {
    bool called = false;
#pragma unroll 1
    for (int entry = 0; entry < entries_; entry += at_once_) {
      const int count = min(at_once_, entries_ - entry);
#pragma unroll 1
      for (int group = member_; group < num_groups_; group += groups_at_once_ * team_) {
        TakeParts(group);
#pragma unroll 1
        for (int i = 0; i < count; ++i) AskForParts(entry + i, i);
        ptx::CommitCopies();
        if (!called) meanwhile();
        called = true;
        ptx::WaitCopies<0>();
#pragma unroll 1
        for (int i = 0; i < count; ++i) FoldParts(entry + i, i, group);
      }
    }
    if (!called) meanwhile();
  }

  // Once all members of a team of several have folded theirs: the first of them writes the rows.
  __device__ void FoldTeam() {
    if (member_ > 0 || !Exists(0)) return;
    ReadFolded(0, &total_);
#pragma unroll 1
    for (int group = 1; group < num_groups_; ++group) {
      Rows next;
      ReadFolded(group, &next);
      total_.Fold(next);
    }
    total_.Write(args_, item_, Row(0));
  }
  __device__ bool is_alone() const { return team_ == 1; }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ int Row(int entry) const { return Rows::Row(first_ + entry); }
  __device__ bool Exists(int entry) const { return Row(entry) < item_.num_rows; }

  // Chooses the parts of the groups from `group` on: lane l has the l-th.
  __device__ void TakeParts(int group) {
    const int mine = (group + index_ * team_) * group_parts_ + place_;
    part_ = index_ < groups_at_once_ && mine < item_.num_parts ? mine : -1;
    count_ = __popc(__ballot_sync(0xffffffffu, part_ >= 0));
  }

  // Shared memory of the i-th of the entries under way.
  __device__ uint32_t States(int i) const { return parts_ + i * entry_bytes_; }
  __device__ uint32_t Parts(int i) const { return States(i) + Teams::kStateBytes; }

  __device__ void AskForParts(int entry, int i) const {
    if (!Exists(entry)) return;
    const int64_t tile = args_.row_tile;
    const int row = Row(entry);
    const auto* outputs =
        reinterpret_cast<const float4*>(args_.outputs + item_.slot * tile * Traits::kHeadDim) +
        Rows::Place(0, row);
    const int part_quads = args_.row_tile * (Traits::kHeadDim / 4);
    if (part_ >= 0) {
      const float2* state = args_.states + (item_.slot + part_) * tile + StateOffset<Traits>(row);
      const uint32_t to = States(i) + lane() * (8 * kRows);
      if constexpr (kRows == 2) {
        ptx::CopyAsync(to, state);
      } else {
        ptx::CopyAsync8(to, state);
      }
    }
    uint32_t to = Parts(i) + lane() * 16;
#pragma unroll 4
    for (int j = 0; j < count_; ++j, to += Teams::kPartBytes) {
      const int part = __shfl_sync(0xffffffffu, part_, j);
      const float4* from = outputs + int64_t{part} * part_quads;
#pragma unroll
      for (int q = 0; q < Rows::kQuads; ++q) {
        if (Rows::Has(q)) ptx::CopyAsync(to + 512 * q, from + 32 * q);
      }
    }
  }

  // Each thread reads what it has copied itself.
  __device__ void FoldParts(int entry, int i, int group) {
    if (!Exists(entry)) return;
    __syncwarp();  // the weights before are no longer read
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float2 state = {};
      if (part_ >= 0) {
        state = ptx::Bits<float2>(ptx::LoadShared64(States(i) + lane() * (8 * kRows) + r * 8));
      }
      const PartWeight weight = PartWeight::Of(state, place_);
      ptx::StoreShared128(weights_ + (lane() * kRows + r) * 16, ptx::Bits<uint4>(weight));
    }
    __syncwarp();
#pragma unroll 1
    for (int begin = 0; begin < count_; begin += group_parts_, group += team_) {
      Rows folded;
      FoldGroup(i, begin, min(begin + group_parts_, count_), &folded);
      Keep(group, folded);
    }
    const bool is_last = group >= num_groups_;
    if (is_alone() && is_last) total_.Write(args_, item_, Row(entry));
  }

  // Parts [begin, end) of those under way. Some are read ahead.
  __device__ void FoldGroup(int i, int begin, int end, Rows* folded) const {
    constexpr int kAhead = 4;
#pragma unroll 1
    for (int first = begin; first < end; first += kAhead) {
      Rows next[kAhead];
      float2 factor[kAhead][kRows];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const int j = min(first + k, end - 1);
#pragma unroll
        for (int q = 0; q < Rows::kQuads; ++q) {
          next[k].output[q] = ptx::Bits<float4>(
              ptx::LoadShared128(Parts(i) + j * Teams::kPartBytes + lane() * 16 + 512 * q));
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const auto weight =
              ptx::Bits<PartWeight>(ptx::LoadShared128(weights_ + (j * kRows + r) * 16));
          factor[k][r] = {weight.old, weight.part};
          next[k].state[r] = {weight.max, weight.sum};
        }
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (first + k >= end) break;
        if (first + k == begin) {
          *folded = next[k];
          continue;
        }
        folded->FoldOutputs(next[k], factor[k]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float sum = __fmaf_rn(folded->state[r].y, factor[k][r].x, next[k].state[r].y);
          folded->state[r] = {next[k].state[r].x, sum};
        }
      }
    }
  }

  // A group's result.
  __device__ void Keep(int group, const Rows& folded) {
    if (is_alone()) {
      if (group == 0) {
        total_ = folded;
      } else {
        total_.Fold(folded);
      }
      return;
    }
    const uint32_t at = folded_ + group * Teams::kPartBytes + lane() * 16;
#pragma unroll
    for (int q = 0; q < Rows::kQuads; ++q) {
      ptx::StoreShared128(at + 512 * q, ptx::Bits<uint4>(folded.output[q]));
    }
    if (lane() > 0) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      ptx::StoreShared64(StateAddress(group, r), ptx::Bits<uint2>(folded.state[r]));
    }
  }
  __device__ void ReadFolded(int group, Rows* rows) const {
    const uint32_t at = folded_ + group * Teams::kPartBytes + lane() * 16;
#pragma unroll
    for (int q = 0; q < Rows::kQuads; ++q) {
      rows->output[q] = ptx::Bits<float4>(ptx::LoadShared128(at + 512 * q));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows->state[r] = ptx::Bits<float2>(ptx::LoadShared64(StateAddress(group, r)));
    }
  }
  __device__ uint32_t StateAddress(int group, int r) const {
    return folded_ + kMaxGroups * Teams::kPartBytes + (group * kRows + r) * 8;
  }

  const VerifyArgs& args_;
  const PlanItem& item_;
  int team_, member_;
  int first_, entries_;  // of this warp
  int at_once_;          // entries
  int entry_bytes_;      // that the parts of one take
  int group_parts_, num_groups_, groups_at_once_;
  int index_, place_;  // of this lane's part: its group among those under way, its place there
  int part_;           // or -1
  int count_;          // parts under way
  uint32_t folded_, weights_, parts_;  // shared memory
  Rows total_;
};

// Called by one thread, when there is no further item.
__device__ inline uint32_t TakeTicket(const VerifyArgs& args, const LaunchCounts& counts) {
  auto& round = args.counters->round[counts.launch % 2];
  const uint32_t first_items = min(counts.num_items, static_cast<int>(gridDim.x));
  if (ptx::LoadAcquire(&round.started) != first_items) return kNoTicket;
  return atomicAdd(&round.tickets, 1);
}

// Called by the whole CTA after its last of `num_items` items: none of them has been reported yet.
// shared->queue.ticket is what TakeTicket has given, and if it stands for a unit, shared->plan its
// pair.
template <class Traits>
__device__ void CombineAll(const VerifyArgs& args, SharedItem* shared, int num_items,
                           const CombineBuffer& buffer) {
  const LaunchCounts counts = shared->queue.counts;
  if (counts.num_split_pairs == 0) return;
  auto& round = args.counters->round[counts.launch % 2];
  Traits::Meet();  // all of this CTA's stores are made
  if (threadIdx.x == 0) ptx::AddRelease(&round.done, num_items);
  const CombineTeams<Traits> teams(args, counts, buffer.bytes);
  const uint32_t units = counts.num_split_pairs * teams.units_per_pair;
  uint32_t unit = shared->queue.ticket;
  bool first = unit < units;
  if (unit == kNoTicket) {
    Traits::Meet();
    if (threadIdx.x == 0) shared->queue.ticket = TakeTicket(args, counts);
    Traits::Meet();
    unit = shared->queue.ticket;
  }
  if (unit >= units) return;
  bool waits = true;
#pragma unroll 1
  while (true) {
    const PlanItem pair = first ? shared->plan : args.pairs[unit / teams.units_per_pair];
    UnitCombiner<Traits> combiner(args, pair, unit % teams.units_per_pair, teams, buffer);
    if (waits && threadIdx.x == 0) {
      while (ptx::LoadAcquire(&round.done) != static_cast<uint32_t>(counts.num_items)) {
      }
    }
    waits = false;
    Traits::Meet();
    uint32_t next = 0;
    combiner.FoldEntries([&] {
      if (threadIdx.x == 0) next = atomicAdd(&round.tickets, 1);
    });
    if (!combiner.is_alone()) {
      Traits::Meet();
      combiner.FoldTeam();
    }
    first = false;
    if (threadIdx.x == 0) shared->queue.ticket = next;
    Traits::Meet();
    unit = shared->queue.ticket;
    if (unit >= units) return;
  }
}

}  // namespace nwor
