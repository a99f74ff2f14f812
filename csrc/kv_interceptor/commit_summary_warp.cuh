#pragma once

#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "kv_interceptor/commit_grid.h"
#include "kv_interceptor/commit_summaries.cuh"
#include "kv_interceptor/commit_summary_units.cuh"
#include "kv_interceptor/commit_table.cuh"
#include "kv_interceptor/commit_verdict.cuh"
#include "kv_interceptor/extremes.cuh"

// Summaries of the blocks that a commit completes, by one or two warps of each thread block beside
// those that move rows. A unit is one head of one block. Every such warp finds its units from the
// requests' lengths, so that nobody has to be asked, and has K of the first on its way while the
// batch is validated. Where there are more than a few units for each of these warps, as after a
// tail was fed again, all warps of the layer deal with the rest when they have done their own.

namespace nwor {

// The summaries of one layer. All lanes of a warp call its methods together.
template <bool kShift>
struct LayerSummaries : LayerUnits<kShift> {
  using LayerUnits<kShift>::layer, LayerUnits<kShift>::table, LayerUnits<kShift>::layer_idx,
      LayerUnits<kShift>::KeyRows, LayerUnits<kShift>::FirstToken;

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
    if (row != 0) return;
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

template <bool kShift, int kLayers>
__device__ LayerSummaries<kShift> SummariesOfBlock(const CommitTable<kLayers>& table,
                                                   const SummaryTable& summaries) {
  const auto layer = static_cast<int>(blockIdx.x / 2);
  return {{table.batch, table.layers[layer], summaries, layer}};
}

// The numbers of a warp's units. Neighbouring ones go to neighbouring thread blocks of the layer's
// two planes, which are not on one SM.
struct UnitNumbers {
  uint32_t block = 2 * blockIdx.y + blockIdx.x % 2;
  uint32_t num_blocks = 2 * gridDim.y;

  // How many the summary warps take at a time, and which is this one's. None if a warp cannot read
  // K of a unit quickly and at once: then all are others'.
  __device__ uint32_t NumOwn(const SummaryTable& table) const {
    return table.quick ? static_cast<uint32_t>(table.warps) * num_blocks : 0;
  }
  __device__ uint32_t Own(const SummaryTable& table) const {
    return block + (threadIdx.x / 32 - static_cast<uint32_t>(table.row_warps)) * num_blocks;
  }
  // Of the rest, the first of any warp, and how far the next one is.
  __device__ uint32_t FirstOther(const SummaryTable& table, uint32_t turns) const {
    return turns * NumOwn(table) + block + threadIdx.x / 32 * num_blocks;
  }
  __device__ uint32_t Step(const SummaryTable& table) const {
    return static_cast<uint32_t>(table.row_warps + table.warps) * num_blocks;
  }
};

// What a warp does that has done its own. REQUIRES: the batch is valid.
template <uint32_t kOwn, int kLayers>
__device__ __noinline__ void SummarizeOthers(const CommitTable<kLayers>& table,
                                             const SummaryTable& summaries) {
  const LayerSummaries layer = SummariesOfBlock</*kShift=*/false>(table, summaries);
  const LaneBlocks blocks = layer.FindBlocks(LaneRequests(table.batch, summaries, 0), 0);
  const UnitNumbers numbers;
#pragma unroll 1
  for (uint32_t number = numbers.FirstOther(summaries, kOwn);; number += numbers.Step(summaries)) {
    const SummaryUnit unit = layer.Find(number, blocks);
    if (unit.request < 0) return;
    layer.Summarize(unit);
  }
}

// Where the warps that move rows learn whether there are others. In shared memory.
class SummaryHelp {
 public:
  // By the summary warps, once, and early.
  __device__ void Tell(bool others, const BlockRoles& roles) {
    if (threadIdx.x == static_cast<unsigned>(roles.rows)) others_ = others;
    ArriveAt(kSummaryHelp, roles.rows + roles.summaries);
  }
  __device__ bool Await(const BlockRoles& roles) const {
    MeetAt(kSummaryHelp, roles.rows + roles.summaries);
    return others_;
  }

 private:
  bool others_;
};

// K of a unit on its way, in shared memory. A lane reads only what it copied itself.
class UnitKeys {
 public:
  // False: not all its rows are there. Nobody waits for them here.
  template <typename Entries>
  __device__ bool Load(const LayerSummaries<true>& layer, const Entries& entries,
                       const SummaryUnit& unit) {
    const PairReading& pairs = layer.table.pairs;
    const PairPlace place(pairs);
    const LaneRows rows =
        layer.KeyRows(unit, layer.KnownPage(unit, entries), entries, 0, pairs.part_tokens);
    if (!rows.whole()) return false;
#pragma unroll
    for (int i = 0; i < kPartPackets; ++i) {
      // The last row again instead of none: extremes do not mind.
      const int row = min(i * pairs.rows_at_once + place.row, rows.count() - 1);
      const char* from = rows.At(row) + place.byte;
      if (i < pairs.num_packets) {
        __pipeline_memcpy_async(&packets_[i][threadIdx.x % 32], from, sizeof(uint4));
      }
    }
    __pipeline_commit();
    return true;
  }

  template <typename T>
  __device__ void Complete(const LayerSummaries<true>& layer, int64_t out_at) const {
    PairExtremes<T> extremes;
    __pipeline_wait_prior(0);
#pragma unroll
    for (int i = 0; i < kPartPackets; ++i) {
      if (i >= layer.table.pairs.num_packets) break;
      const uint4 words = packets_[i][threadIdx.x % 32];
      extremes.Add({{words.x, words.y, words.z, words.w}}, 1.0f);
    }
    layer.StorePairs(extremes, PairPlace(layer.table.pairs).row, out_at);
  }

 private:
  uint4 packets_[kPartPackets][32];
};

// What a summary warp does: up to kOwn units. Nothing is written unless the verdict allows it;
// until it is there, what is read is within bounds and goes nowhere. Returns whether there are
// others, for all warps.
template <typename Entries, uint32_t kOwn, int kLayers>
__device__ bool CompleteSummaries(const CommitTable<kLayers>& table, const SummaryTable& summaries,
                                  const BlockRoles& roles, VerdictPost& post, SummaryHelp& help) {
  constexpr bool kFew = Entries::kKnown;
  __shared__ UnitKeys keys_of_warps[kMaxSummaryWarps];
  const LaneRequests requests(table.batch, summaries, 0);
  const Entries entries(table.batch);
  const LayerSummaries layer = SummariesOfBlock</*kShift=*/true>(table, summaries);
  const LaneBlocks blocks = layer.FindBlocks(requests, 0);
  if (blocks.total == 0 && (kFew || NumRequests(table.batch) <= 32)) {  // as in partial steps
    help.Tell(false, roles);
    post.DoWithout(roles);
    return false;
  }
  const UnitNumbers numbers;
  const uint32_t num_own = numbers.NumOwn(summaries);
  UnitKeys& keys = keys_of_warps[(threadIdx.x - static_cast<uint32_t>(roles.rows)) / 32];
  bool others = false;
#pragma unroll 1
  for (uint32_t turn = 0; turn < kOwn; ++turn) {
    SummaryUnit unit;
    if (num_own > 0) {
      unit = layer.template FindEarly<kFew>(numbers.Own(summaries) + turn * num_own, blocks);
    }
    const bool loads = unit.request >= 0 && keys.Load(layer, entries, unit);
    const int64_t out_at = loads ? layer.OutAt(unit) : 0;
    if (turn == 0) {
      others = layer.template FindEarly<kFew>(kOwn * num_own, blocks).request >= 0;
      help.Tell(others, roles);
      if (post.AwaitLate(roles).fault != kNoFault) {
        others = false;
        break;
      }
    }
    if (unit.request < 0) break;
    if (!loads) continue;
    if (summaries.row_dtype == DType::kFloat16) {
      keys.Complete<__half>(layer, out_at);
    } else {
      keys.Complete<__nv_bfloat16>(layer, out_at);
    }
  }
  __pipeline_wait_prior(0);  // the block must not end before its copies
  return others;
}

}  // namespace nwor
