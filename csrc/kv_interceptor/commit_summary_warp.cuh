#pragma once

#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "kv_interceptor/commit_grid.h"
#include "kv_interceptor/commit_summaries.cuh"
#include "kv_interceptor/commit_summary_units.cuh"
#include "kv_interceptor/commit_table.cuh"
#include "kv_interceptor/commit_verdict.cuh"
#include "kv_interceptor/extremes.cuh"

// Summaries of the blocks that a commit completes, by one warp of each thread block beside those
// that move rows. A unit is one head of one block. Every warp finds its own units from the
// requests' lengths, so that nobody has to be asked, and has K of several of them on its way, the
// first ones while the batch is validated. Where there are more than a few units for each of these
// warps, as after a tail was fed again, those that move rows help when they have done so.

namespace nwor {

// The summaries of one layer. All lanes of a warp call its methods together.
struct LayerSummaries : LayerUnits {
  __device__ int64_t OutAt(const SummaryUnit& unit) const {
    const CommitSummaries& to = table.to;
    return layer_idx * to.layer_stride + unit.row * to.row_stride + unit.block * to.block_stride +
           unit.head * to.head_stride;
  }

  // `row`: of those that the warp reads at once, the lane's.
  template <typename T>
  __device__ void StorePairs(PairExtremes<T>& extremes, int row, int64_t out_at) const {
    const auto lane = static_cast<int>(threadIdx.x % 32);
    const auto lanes_per_row = static_cast<int>(table.pairs.lanes_per_row);
#pragma unroll 1
    for (int other = 1; other < table.pairs.rows_at_once; ++other) {
      extremes.Meet((lane + other * lanes_per_row) % 32, row == 0);
    }
    if (row != 0 || out_at < 0) return;
    const int64_t at = out_at + lane * 8;
    extremes.Store(static_cast<T*>(table.to.kmax) + at, static_cast<T*>(table.to.kmin) + at);
  }

  template <typename T>
  __device__ void SummarizePairs(const SummaryUnit& unit) const {
    constexpr int kAtOnce = 4;
    const PairReading& pairs = table.pairs;
    const PairPlace place(pairs);
    PairExtremes<T> extremes;
#pragma unroll 1
    for (int32_t part = 0; part < pairs.num_parts; ++part) {
      const LaneRows rows =
          KeyRows(unit, -1, NoEntries(), part * pairs.part_tokens, pairs.part_tokens);
      if (!rows.whole()) return;
#pragma unroll 1
      for (int first = 0; first < pairs.num_packets; first += kAtOnce) {
        typename PairExtremes<T>::Loaded packets[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          // The last row again instead of none: extremes do not mind.
          const int index = min((first + i) * pairs.rows_at_once + place.row, rows.count() - 1);
          packets[i] = PairExtremes<T>::Load(rows.At(index) + place.byte);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) extremes.Add(packets[i], 1.0f);
      }
    }
    StorePairs(extremes, place.row, OutAt(unit));
  }

  __device__ void Summarize(const SummaryUnit& unit) const {
    if (table.pairs.lanes_per_row == 0) return SummarizePlain(unit);
    if (table.row_dtype == DType::kFloat16) return SummarizePairs<__half>(unit);
    SummarizePairs<__nv_bfloat16>(unit);
  }

 private:
  __device__ void SummarizePlain(const SummaryUnit& unit) const {
    const float scale =
        layer.scales[0] == nullptr ? 1.0f : layer.scales[0][unit.head * layer.scale_stride[0]];
    const int32_t cached = unit.cached - FirstToken(unit.block);
#pragma unroll 1
    for (int base = 0; base < table.head_dim; base += 32) {
      const int channel = base + static_cast<int>(threadIdx.x % 32);
      float high = -INFINITY, low = INFINITY;
#pragma unroll 1
      for (int first = 0; first < table.to.block_size; first += 32) {
        const LaneRows rows = KeyRows(unit, -1, NoEntries(), first, 32);
        if (!rows.whole()) return;
        AddPlainRows(rows, table, cached - first, scale, channel, &high, &low);
      }
      if (channel < table.head_dim) {
        WriteFloat(table.to.kmax, OutAt(unit) + channel, table.to.dtype, high);
        WriteFloat(table.to.kmin, OutAt(unit) + channel, table.to.dtype, low);
      }
    }
  }
};

// Which of a layer's units are a warp's, one after the other. Neighbouring units go to neighbouring
// blocks of the grid, which are not on one SM.
class UnitShare {
 public:
  static constexpr uint32_t kOwn = 4;  // of each summary warp; those beyond are the others'

  __device__ static UnitShare OfSummaryWarp() { return {Block(), NumBlocks()}; }
  __device__ static UnitShare OfOtherWarp() {
    return {NumOwn() + threadIdx.x / 32 * NumBlocks() + Block(), kCommitWarps * NumBlocks()};
  }
  // Units of all summary warps of a layer.
  __device__ static uint32_t NumOwn() { return kOwn * NumBlocks(); }

  __device__ uint32_t unit() const { return unit_; }
  __device__ void Advance() { unit_ += step_; }

 private:
  __device__ UnitShare(uint32_t unit, uint32_t step) : unit_(unit), step_(step) {}
  // Of the thread blocks of a layer's two planes.
  __device__ static uint32_t NumBlocks() { return 2 * gridDim.y; }
  __device__ static uint32_t Block() { return 2 * blockIdx.y + blockIdx.x % 2; }

  uint32_t unit_;
  uint32_t step_;
};

// Where the warps that move rows learn whether they have to help. In shared memory.
class SummaryHelp {
 public:
  // Before the block meets.
  __device__ void Init() {
    if (threadIdx.x == 0) bulk::InitBarrier(Address(), 1);
  }
  // By the summary warp, once, and early.
  __device__ void Tell(bool wanted) {
    if (threadIdx.x % 32 != 0) return;
    wanted_ = wanted;
    bulk::ArriveOnce(Address());
  }
  __device__ bool Await() const {
    bulk::Wait(Address(), 0);
    return wanted_;
  }

 private:
  __device__ uint32_t Address() const {
    return static_cast<uint32_t>(__cvta_generic_to_shared(&barrier_));
  }

  uint64_t barrier_;
  bool wanted_;
};

// Whether there are more units than are the summary warps'.
__device__ inline bool WantsHelp(const LayerUnits& units, const LaneBlocks& blocks) {
  return units.FindEarly(UnitShare::NumOwn(), blocks).request >= 0;
}

template <int kLayers>
__device__ LayerSummaries SummariesOfBlock(const CommitTable<kLayers>& table,
                                           const SummaryTable& summaries) {
  const auto layer = static_cast<int>(blockIdx.x / 2);
  return {{table.batch, table.layers[layer], summaries, layer}};
}

// The units of the summary warp, or of one that `helps`. REQUIRES: the batch is valid.
template <int kLayers>
__device__ __noinline__ void Summarize(const CommitTable<kLayers>& table,
                                       const SummaryTable& summaries, bool helps) {
  const LayerSummaries layer = SummariesOfBlock(table, summaries);
  const LaneBlocks blocks = layer.FindBlocks(LaneRequests(table.batch, summaries, 0), 0);
  UnitShare share = helps ? UnitShare::OfOtherWarp() : UnitShare::OfSummaryWarp();
#pragma unroll 1
  for (; helps || share.unit() < UnitShare::NumOwn(); share.Advance()) {
    const SummaryUnit unit = layer.Find(share.unit(), blocks);
    if (unit.request < 0) return;
    layer.Summarize(unit);
  }
}

// What a warp has on its way: parts of units. A lane reads only what it copied itself.
template <typename Entries>
struct SummaryStages {
  static constexpr uint32_t kParts = 4;
  uint4 packets[kParts][kPartPackets][32];
  // Where the unit's summary goes; kLeftOut: a page is out of range; kMore: it has more parts.
  int64_t out_at[kParts][32];
  static constexpr int64_t kLeftOut = -1, kMore = -2;
  Entries entries;
};

// Channels of one 16-bit type.
template <typename T, typename Entries>
class PairSummaries {
  using Stages = SummaryStages<Entries>;

 public:
  __device__ PairSummaries(const LayerSummaries& summaries, const LaneRequests& requests,
                           Stages& stages)
      : summaries_(summaries),
        blocks_(summaries.FindBlocks(requests, 0)),
        stages_(stages),
        place_(summaries.table.pairs),
        share_(UnitShare::OfSummaryWarp()) {}

  // Nothing is written unless the verdict allows it. Until it is there, what is read is within
  // bounds and goes nowhere.
  __device__ void Complete(const VerdictPost<true>& post, SummaryHelp& help) {
    PairExtremes<T> extremes;
    stages_.entries.Await();
#pragma unroll 1
    for (uint32_t step = 0;; ++step) {
      if (step == num_started_) Start();
      __pipeline_commit();
      if (step == 0) help.Tell(num_started_ > 0 && WantsHelp(summaries_, blocks_));
      if (step + 1 < kParts) continue;
      if (step + 1 == num_started_ + kParts) return;
      __pipeline_wait_prior(kParts - 1);
      const uint32_t stage = (step + 1) % kParts;
      AddPart(stage, extremes);
      const int64_t out_at = stages_.out_at[stage][lane()];
      if (out_at == Stages::kMore) continue;
      if (post.Await().fault != kNoFault) break;
      summaries_.StorePairs(extremes, place_.row, out_at);
      extremes = {};
    }
    __pipeline_wait_prior(0);  // the block must not end before its copies
  }

 private:
  static constexpr uint32_t kParts = Stages::kParts;

  __device__ static uint32_t lane() { return threadIdx.x % 32; }
  __device__ const PairReading& pairs() const { return summaries_.table.pairs; }

  // Starts the next part, if there is one.
  __device__ void Start() {
    if (part_ == 0) {
      unit_ = share_.unit() < UnitShare::NumOwn() ? summaries_.FindEarly(share_.unit(), blocks_)
                                                  : SummaryUnit();
    }
    if (unit_.request < 0) return;
    const int32_t page = summaries_.KnownPage(unit_, stages_.entries);
    const uint32_t stage = num_started_++ % kParts;
    const LaneRows rows = summaries_.KeyRows(unit_, page, stages_.entries,
                                             part_ * pairs().part_tokens, pairs().part_tokens);
    if (rows.whole()) {
      CopyRows(rows, stage);
    } else {
      unit_.row = -1;
    }
    const bool more = ++part_ < pairs().num_parts;
    stages_.out_at[stage][lane()] = more            ? Stages::kMore
                                    : unit_.row < 0 ? Stages::kLeftOut
                                                    : summaries_.OutAt(unit_);
    if (more) return;
    part_ = 0;
    share_.Advance();
  }

  // Addresses first, a few at a time, so that copies follow each other closely.
  __device__ void CopyRows(const LaneRows& rows, uint32_t stage) const {
    constexpr int kAtOnce = 4;
    const auto to =
        static_cast<uint32_t>(__cvta_generic_to_shared(&stages_.packets[stage][0][lane()]));
#pragma unroll
    for (int first = 0; first < kPartPackets; first += kAtOnce) {
      const char* from[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        // The last row again instead of none: extremes do not mind.
        const int row = (first + i) * pairs().rows_at_once + place_.row;
        from[i] = rows.At(min(row, rows.count() - 1)) + place_.byte;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < pairs().num_packets) {
          const auto offset = static_cast<uint32_t>((first + i) * sizeof(stages_.packets[0][0]));
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + offset), "l"(from[i])
                       : "memory");
        }
      }
    }
  }

  __device__ void AddPart(uint32_t stage, PairExtremes<T>& extremes) const {
#pragma unroll
    for (int i = 0; i < kPartPackets; ++i) {
      if (i >= pairs().num_packets) return;
      const uint4 words = stages_.packets[stage][i][lane()];
      extremes.Add({{words.x, words.y, words.z, words.w}}, 1.0f);
    }
  }

  const LayerSummaries summaries_;
  const LaneBlocks blocks_;
  Stages& stages_;
  const PairPlace place_;
  UnitShare share_;  // the unit at hand
  SummaryUnit unit_;
  int32_t part_ = 0;  // of it, the next to start
  uint32_t num_started_ = 0;
};

// What the summary warp does.
template <typename Entries, int kLayers>
__device__ void CompleteSummaries(const CommitTable<kLayers>& table, const SummaryTable& summaries,
                                  VerdictPost<true>& post, int num_deciders, SummaryHelp& help) {
  __shared__ SummaryStages<Entries> stages;
  const LaneRequests requests(table.batch, summaries, 0);
  const bool in_pairs = summaries.pairs.lanes_per_row > 0;
  if (in_pairs) stages.entries.Start(table.batch);
  post.Open(num_deciders);
  const LayerSummaries units = SummariesOfBlock(table, summaries);
  if (!in_pairs) {
    help.Tell(WantsHelp(units, units.FindBlocks(requests, 0)));
    if (post.Await().fault != kNoFault) return;
    Summarize(table, summaries, /*helps=*/false);
  } else if (summaries.row_dtype == DType::kFloat16) {
    PairSummaries<__half, Entries>(units, requests, stages).Complete(post, help);
  } else {
    PairSummaries<__nv_bfloat16, Entries>(units, requests, stages).Complete(post, help);
  }
}

// What a warp does that has moved its rows. REQUIRES: the batch is valid.
template <int kLayers>
__device__ void HelpWithSummaries(const CommitTable<kLayers>& table, const SummaryTable& summaries,
                                  const SummaryHelp& help) {
  if (summaries.to.kmax == nullptr || !help.Await()) return;
  Summarize(table, summaries, /*helps=*/true);
}

}  // namespace nwor
