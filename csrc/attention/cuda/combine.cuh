#pragma once

#include "attention/cuda/combine_shape.h"
#include "attention/cuda/merge.cuh"

// The combine: merges the partial results of output tiles whose prefix was split over several work
// tiles, like FlashAttention's combine kernel, but at the end of the same launch. CTAs that find
// the queue empty share it: each takes tickets, one per unit of rows. A CTA waits only for CTAs
// that run: it gets no ticket until all CTAs have their first work tile, and the CTA that ends last
// always gets one.
//
//   CombineAll      the loop over tickets; both kernels call it
//   CombineTeams    how the warps of a CTA share a unit
//   UnitCombiner    one warp's share: loads partials, merges groups, then the request
//   CombinedRows    the rows that a warp holds in registers
//
// A Traits type here has Element, kHeadDim, kThreads, kTwoRows, kSplitQuads and Sync, a barrier for
// the CTA's first kThreads threads.

namespace nwor {

inline constexpr uint32_t kNoTicket = 0xffffffffu;

// Shared memory for the combine.
struct CombineBuffer {
  uint32_t address;
  int bytes;
};

// One or two rows of an output tile, as a warp holds them. All lanes have the states; lane l has
// quads l, l + 32, ... of four values. Slots of the sm_90a kernel hold either rows r and r + 8
// together, in quads of two values of each (kTwoRows), or one row in quads of channels c, c + 1, c
// + 8 and c + 9 (kSplitQuads).
template <class Traits>
struct CombinedRows {
  static constexpr int kRows = Traits::kTwoRows ? 2 : 1;
  static constexpr int kChannels = 4 / kRows;  // of one row in a quad
  static constexpr int kRowQuads = Traits::kHeadDim / kChannels;
  static constexpr int kQuads = (kRowQuads + 31) / 32;
  float4 output[kQuads];
  float2 state[kRows];

  // The first row of entry `index`, and the number of entries in a slot of `tile` rows.
  __device__ static int Row(int index) { return kRows == 1 ? index : index / 8 * 16 + index % 8; }
  __device__ static int Count(int tile) { return tile / kRows; }
  // This lane's i-th quad: its index, whether it exists, the channel of a row's c-th value (c is 0
  // or 2), and its offset in a slot.
  __device__ static int Quad(int i) { return i * 32 + static_cast<int>(threadIdx.x % 32); }
  __device__ static bool Has(int i) { return kRowQuads % 32 == 0 || Quad(i) < kRowQuads; }
  __device__ static int Channel(int i, int c) {
    if constexpr (Traits::kSplitQuads) return Quad(i) / 4 * 16 + Quad(i) % 4 * 2 + c * 4;
    return kRows == 1 ? Quad(i) * 4 + c : Quad(i) / 4 * 8 + Quad(i) % 4 * 2;
  }
  __device__ static int Offset(int i, int row) {
    return (kRows == 1 ? row : row / 16 * 8 + row % 8) * kRowQuads + Quad(i);
  }

  // Merges a later result; `weight` is what MergeSoftmaxState returns for the states.
  __device__ void MergeOutputs(const CombinedRows& later, const float2 (&weight)[kRows]) {
#pragma unroll
    for (int i = 0; i < kQuads; ++i) {
      output[i] = MergeOutput(output[i], later.output[i], weight[0], weight[kRows - 1]);
    }
  }
  __device__ void Merge(const CombinedRows& later) {
    float2 weight[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) weight[r] = MergeSoftmaxState(&state[r], later.state[r]);
    MergeOutputs(later, weight);
  }

  __device__ void Write(const VerifyArgs& args, const WorkTile& work_tile, int row) const {
    using T = typename Traits::Element;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int at_row = row + 8 * r;
      if (at_row >= work_tile.num_rows) break;
      const OutputRow at = LocateRow(args, work_tile, at_row);
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
      if (threadIdx.x % 32 == 0) WriteLse(args, work_tile, at_row, state[r]);
    }
  }
};

// How a partial is merged into its group, for one row: the weights (old, new), the maximum
// afterwards, and its sum times its weight.
struct PartialWeight {
  float old, partial;
  float max, sum;

  // Each lane has the state of one partial and the partial's index in its group; the lanes before
  // it have the partials before it. Called by a whole warp.
  __device__ static PartialWeight Of(float2 state, int in_group) {
    float max = state.x;
#pragma unroll
    for (int distance = 1; distance < kMaxGroupSplits; distance *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, max, distance);
      if (in_group >= distance) max = fmaxf(other, max);
    }
    const float before = __shfl_up_sync(0xffffffffu, max, 1);
    if (in_group == 0) return {0.0f, 1.0f, max, state.y};
    const float weight = StateWeight(state.x, max);
    return {StateWeight(before, max), weight, max, __fmul_rn(state.y, weight)};
  }
};
static_assert(sizeof(PartialWeight) == sizeof(uint4));

// How a CTA combines a unit: some entries (CombinedRows) of one output tile. If there are few
// output tiles, units are small, so that all CTAs take part: a team of warps shares an entry, its
// members merge groups of partials, and its first member merges the groups. If there are many,
// units are large: a warp has several entries and loads the partials of as many as fit at once.
template <class Traits>
struct CombineTeams {
  using Rows = CombinedRows<Traits>;
  static constexpr int kWarps = Traits::kThreads / 32;
  static constexpr int kPartialBytes = CombinePartialBytes(Traits::kHeadDim, Rows::kRows);
  static constexpr int kStateBytes = CombineStateBytes(Rows::kRows);  // of all partials in flight
  static constexpr int kWeightBytes = CombineWeightBytes(Rows::kRows);
  static constexpr int kMinWarpBytes =
      CombineWarpBytes(Traits::kHeadDim, Rows::kRows, kMaxGroupSplits);
  static constexpr int kMergedBytes =
      kMaxGroups * (kPartialBytes + 8 * Rows::kRows);  // of an entry
  static_assert(kPartialBytes == 512 * Rows::kQuads &&
                kWeightBytes == 32 * Rows::kRows * sizeof(PartialWeight));

  int entries;  // of a unit: a power of two
  int units_per_output;

  __device__ CombineTeams(const VerifyArgs& args, const LaunchCounts& counts, int buffer_bytes) {
    const int all = Rows::Count(args.row_tile);
    const int entry_bytes = kStateBytes + counts.max_partials * kPartialBytes;
    const int64_t ctas = min(counts.num_work_tiles, static_cast<int>(gridDim.x));
    // A team needs room for its groups. Units grow beyond one entry per warp (every row tile has
    // that many) only while all partials of a unit fit at once.
    for (entries = 1; entries < all; entries *= 2) {
      const bool has_room =
          entries >= kWarps || entries * kMergedBytes + kWarps * kMinWarpBytes <= buffer_bytes;
      if (has_room && int64_t{counts.num_split_outputs} * (all / entries) <= ctas) break;
      const int twice = kWarps * kWeightBytes + 2 * entries * entry_bytes;
      if (entries >= kWarps && twice > buffer_bytes) break;
    }
    units_per_output = all / entries;
  }
  __device__ int team_warps() const { return entries < kWarps ? kWarps / entries : 1; }
  __device__ int warp_entries() const { return entries < kWarps ? 1 : entries / kWarps; }
};

// One warp's share of a unit. It keeps as many loads in flight as fit, and waits for nothing
// before them: ptxas waits for a load at the head of the next loop, whether the loop uses it or
// not.
template <class Traits>
class UnitCombiner {
  using Rows = CombinedRows<Traits>;
  using Teams = CombineTeams<Traits>;
  static constexpr int kRows = Rows::kRows;

 public:
  // `work_tile` is the output tile's first one, `unit` the index among the output tile's units.
  __device__ UnitCombiner(const VerifyArgs& args, const WorkTile& work_tile, int unit,
                          const Teams& teams, const CombineBuffer& buffer)
      : args_(args),
        work_tile_(work_tile),
        team_(teams.team_warps()),
        entries_(teams.warp_entries()) {
    const int warp = threadIdx.x / 32;
    const int entry = warp / team_;
    member_ = warp % team_;
    first_ = unit * teams.entries + entry * entries_;
    group_partials_ = SplitsPerGroup(work_tile.num_splits) / work_tile.splits_per_partial();
    num_groups_ = (work_tile.num_partials + group_partials_ - 1) / group_partials_;
    const int merged = team_ > 1 ? teams.entries * Teams::kMergedBytes : 0;
    const int mine = (buffer.bytes - merged) / Teams::kWarps / 16 * 16;
    merged_ = buffer.address + entry * Teams::kMergedBytes;
    weights_ = buffer.address + merged + warp * mine;
    partials_ = weights_ + Teams::kWeightBytes;
    const int room = mine - Teams::kWeightBytes;
    entry_bytes_ = Teams::kStateBytes + work_tile.num_partials * Teams::kPartialBytes;
    at_once_ = work_tile.num_partials > 32 ? 0 : min(room / entry_bytes_, entries_);
    groups_at_once_ = num_groups_;
    if (at_once_ == 0) {  // not even the partials of one entry fit
      at_once_ = 1;
      groups_at_once_ =
          min((room - Teams::kStateBytes) / Teams::kPartialBytes, 32) / group_partials_;
    }
    index_ = lane() / group_partials_;
    in_group_ = lane() - index_ * group_partials_;
  }

  // Calls meanwhile() once the first loads are in flight. A warp without a team writes its rows;
  // others leave their groups in shared memory.
  template <typename Meanwhile>
  __device__ void MergeEntries(Meanwhile meanwhile) {
    bool called = false;
#pragma unroll 1
    for (int entry = 0; entry < entries_; entry += at_once_) {
      const int count = min(at_once_, entries_ - entry);
#pragma unroll 1
      for (int group = member_; group < num_groups_; group += groups_at_once_ * team_) {
        SelectPartials(group);
#pragma unroll 1
        for (int i = 0; i < count; ++i) LoadPartials(entry + i, i);
        ptx::CommitCopies();
        if (!called) meanwhile();
        called = true;
        ptx::WaitCopies<0>();
#pragma unroll 1
        for (int i = 0; i < count; ++i) MergePartials(entry + i, i, group);
      }
    }
    if (!called) meanwhile();
  }

  // Called once all members of a team have merged their groups: the first member writes the rows.
  __device__ void MergeTeam() {
    if (member_ > 0 || !Exists(0)) return;
    ReadMerged(0, &total_);
#pragma unroll 1
    for (int group = 1; group < num_groups_; ++group) {
      Rows next;
      ReadMerged(group, &next);
      total_.Merge(next);
    }
    total_.Write(args_, work_tile_, Row(0));
  }
  __device__ bool has_no_team() const { return team_ == 1; }

 private:
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ int Row(int entry) const { return Rows::Row(first_ + entry); }
  __device__ bool Exists(int entry) const { return Row(entry) < work_tile_.num_rows; }

  // Selects the partials of the groups from `group` on: lane l has the l-th.
  __device__ void SelectPartials(int group) {
    const int mine = (group + index_ * team_) * group_partials_ + in_group_;
    partial_ = index_ < groups_at_once_ && mine < work_tile_.num_partials ? mine : -1;
    count_ = __popc(__ballot_sync(0xffffffffu, partial_ >= 0));
  }

  // Shared memory of the i-th entry in flight.
  __device__ uint32_t States(int i) const { return partials_ + i * entry_bytes_; }
  __device__ uint32_t Partials(int i) const { return States(i) + Teams::kStateBytes; }

  __device__ void LoadPartials(int entry, int i) const {
    if (!Exists(entry)) return;
    const int64_t tile = args_.row_tile;
    const int row = Row(entry);
    const auto* outputs =
        reinterpret_cast<const float4*>(args_.outputs + work_tile_.slot * tile * Traits::kHeadDim) +
        Rows::Offset(0, row);
    const int partial_quads = args_.row_tile * (Traits::kHeadDim / 4);
    if (partial_ >= 0) {
      const float2* state =
          args_.states + (work_tile_.slot + partial_) * tile + StateOffset<Traits>(row);
      const uint32_t to = States(i) + lane() * (8 * kRows);
      if constexpr (kRows == 2) {
        ptx::CopyAsync(to, state);
      } else {
        ptx::CopyAsync8(to, state);
      }
    }
    uint32_t to = Partials(i) + lane() * 16;
#pragma unroll 4
    for (int j = 0; j < count_; ++j, to += Teams::kPartialBytes) {
      const int partial = __shfl_sync(0xffffffffu, partial_, j);
      const float4* from = outputs + int64_t{partial} * partial_quads;
#pragma unroll
      for (int q = 0; q < Rows::kQuads; ++q) {
        if (Rows::Has(q)) ptx::CopyAsync(to + 512 * q, from + 32 * q);
      }
    }
  }

  // Every thread reads only what it has copied itself.
  __device__ void MergePartials(int entry, int i, int group) {
    if (!Exists(entry)) return;
    __syncwarp();  // the previous weights are no longer read
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float2 state = {};
      if (partial_ >= 0) {
        state = ptx::Bits<float2>(ptx::LoadShared64(States(i) + lane() * (8 * kRows) + r * 8));
      }
      const PartialWeight weight = PartialWeight::Of(state, in_group_);
      ptx::StoreShared128(weights_ + (lane() * kRows + r) * 16, ptx::Bits<uint4>(weight));
    }
    __syncwarp();
#pragma unroll 1
    for (int begin = 0; begin < count_; begin += group_partials_, group += team_) {
      Rows merged;
      MergeGroup(i, begin, min(begin + group_partials_, count_), &merged);
      StoreGroup(group, merged);
    }
    const bool is_last = group >= num_groups_;
    if (has_no_team() && is_last) total_.Write(args_, work_tile_, Row(entry));
  }

  // Merges partials [begin, end) of those in flight. Some are read ahead.
  __device__ void MergeGroup(int i, int begin, int end, Rows* merged) const {
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
              ptx::LoadShared128(Partials(i) + j * Teams::kPartialBytes + lane() * 16 + 512 * q));
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const auto weight =
              ptx::Bits<PartialWeight>(ptx::LoadShared128(weights_ + (j * kRows + r) * 16));
          factor[k][r] = {weight.old, weight.partial};
          next[k].state[r] = {weight.max, weight.sum};
        }
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (first + k >= end) break;
        if (first + k == begin) {
          *merged = next[k];
          continue;
        }
        merged->MergeOutputs(next[k], factor[k]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float sum = __fmaf_rn(merged->state[r].y, factor[k][r].x, next[k].state[r].y);
          merged->state[r] = {next[k].state[r].x, sum};
        }
      }
    }
  }

  // Merges a group's result into the request's, or leaves it for the team.
  __device__ void StoreGroup(int group, const Rows& merged) {
    if (has_no_team()) {
      if (group == 0) {
        total_ = merged;
      } else {
        total_.Merge(merged);
      }
      return;
    }
    const uint32_t at = merged_ + group * Teams::kPartialBytes + lane() * 16;
#pragma unroll
    for (int q = 0; q < Rows::kQuads; ++q) {
      ptx::StoreShared128(at + 512 * q, ptx::Bits<uint4>(merged.output[q]));
    }
    if (lane() > 0) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      ptx::StoreShared64(StateAddress(group, r), ptx::Bits<uint2>(merged.state[r]));
    }
  }
  __device__ void ReadMerged(int group, Rows* rows) const {
    const uint32_t at = merged_ + group * Teams::kPartialBytes + lane() * 16;
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
    return merged_ + kMaxGroups * Teams::kPartialBytes + (group * kRows + r) * 8;
  }

  const VerifyArgs& args_;
  const WorkTile& work_tile_;
  int team_, member_;
  int first_, entries_;  // of this warp
  int at_once_;          // entries whose partials are loaded at once
  int entry_bytes_;      // shared memory for the partials of one entry
  int group_partials_, num_groups_, groups_at_once_;
  int index_, in_group_;  // this lane's partial: its group among those in flight, its index in it
  int partial_;           // this lane's partial, or -1
  int count_;             // partials in flight
  uint32_t merged_, weights_, partials_;  // shared memory
  Rows total_;
};

// Takes a unit of the combine, or kNoTicket if some CTA has not started. Called by one thread, when
// the queue is empty.
__device__ inline uint32_t TakeTicket(const VerifyArgs& args, const LaunchCounts& counts) {
  auto& counters = args.counters->per_launch[counts.launch % 2];
  const uint32_t first_work_tiles = min(counts.num_work_tiles, static_cast<int>(gridDim.x));
  if (ptx::LoadAcquire(&counters.started) != first_work_tiles) return kNoTicket;
  return atomicAdd(&counters.tickets, 1);
}

// Combines until there are no more tickets. Called by the whole CTA after the last of its
// `num_work_tiles` work tiles, none of which has been counted as done. shared->queue.ticket is what
// TakeTicket returned; if it stands for a unit, shared->plan is its output tile.
template <class Traits>
__device__ void CombineAll(const VerifyArgs& args, SharedWorkTile* shared, int num_work_tiles,
                           const CombineBuffer& buffer) {
  const LaunchCounts counts = shared->queue.counts;
  if (counts.num_split_outputs == 0) return;
  auto& counters = args.counters->per_launch[counts.launch % 2];
  Traits::Sync();  // all of this CTA's stores are done
  if (threadIdx.x == 0) ptx::AddRelease(&counters.done, num_work_tiles);
  const CombineTeams<Traits> teams(args, counts, buffer.bytes);
  const uint32_t units = counts.num_split_outputs * teams.units_per_output;
  uint32_t unit = shared->queue.ticket;
  bool first = unit < units;
  if (unit == kNoTicket) {
    Traits::Sync();
    if (threadIdx.x == 0) shared->queue.ticket = TakeTicket(args, counts);
    Traits::Sync();
    unit = shared->queue.ticket;
  }
  if (unit >= units) return;
  bool must_wait = true;
#pragma unroll 1
  while (true) {
    const WorkTile output_tile =
        first ? shared->plan : args.split_outputs[unit / teams.units_per_output];
    UnitCombiner<Traits> combiner(args, output_tile, unit % teams.units_per_output, teams, buffer);
    if (must_wait && threadIdx.x == 0) {
      while (ptx::LoadAcquire(&counters.done) != static_cast<uint32_t>(counts.num_work_tiles)) {
      }
    }
    must_wait = false;
    Traits::Sync();
    uint32_t next = 0;
    combiner.MergeEntries([&] {
      if (threadIdx.x == 0) next = atomicAdd(&counters.tickets, 1);
    });
    if (!combiner.has_no_team()) {
      Traits::Sync();
      combiner.MergeTeam();
    }
    first = false;
    if (threadIdx.x == 0) shared->queue.ticket = next;
    Traits::Sync();
    unit = shared->queue.ticket;
    if (unit >= units) return;
  }
}

}  // namespace nwor
