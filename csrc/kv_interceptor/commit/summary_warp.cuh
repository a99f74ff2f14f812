#pragma once

#include <cstdint>

#include "kv_interceptor/commit/grid.h"
#include "kv_interceptor/commit/summaries.cuh"
#include "kv_interceptor/commit/summary_fetch.cuh"
#include "kv_interceptor/commit/summary_units.cuh"
#include "kv_interceptor/commit/table.cuh"
#include "kv_interceptor/commit/verdict.cuh"
#include "kv_interceptor/extremes.cuh"

// Summaries of the blocks that a commit completes, by one or two warps of each thread block beside
// those that move rows. A unit is one head of one block. Every such warp finds its units from the
// requests' lengths, so that nobody has to be asked, and has K of a few on its way while the batch
// is validated. Where there are more, as after a tail was fed again, all warps of the layer deal
// with the rest when they have done their own.

namespace nwor {

// The summaries of one layer. All lanes of a warp call its methods together.
struct LayerSummaries : LayerUnits {
  __device__ int64_t OutAt(const SummaryUnit& unit) const {
    const CommitSummaries& to = table.to;
    return layer_idx * to.layer_stride + unit.row * to.row_stride + unit.block * to.block_stride +
           unit.head * to.head_stride;
  }

  template <typename T>
  __device__ void SummarizePairs(const SummaryUnit& unit) const {
    constexpr int kAtOnce = 4;
    const PairReading& pairs = table.pairs;
    const PairPlace place(pairs);
    PairExtremes<T> extremes;
#pragma unroll 1
    for (int32_t part = 0; part < pairs.num_parts; ++part) {
      const int32_t first = part * pairs.part_tokens;
      const LaneRows rows(KeyRow(unit, first), min(pairs.part_tokens, table.to.block_size - first));
      if (!rows.whole()) return;
#pragma unroll 1
      for (int packet = 0; packet < pairs.num_packets; packet += kAtOnce) {
        typename PairExtremes<T>::Loaded packets[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          // The last row again instead of none: extremes do not mind.
          const int index = min((packet + i) * pairs.rows_at_once + place.row, rows.count() - 1);
          packets[i] = PairExtremes<T>::Load(rows.At(index) + place.byte);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) extremes.Add(packets[i], 1.0f);
      }
    }
    const int64_t at = OutAt(unit) + place.byte / 2;
    MeetRows(extremes, pairs, place.row);
    if (place.row == 0) {
      extremes.Store(static_cast<T*>(table.to.kmax) + at, static_cast<T*>(table.to.kmin) + at);
    }
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
        const LaneRows rows(KeyRow(unit, first), min(32, table.to.block_size - first));
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

template <int kLayers>
__device__ LayerUnits UnitsOfBlock(const CommitTable<kLayers>& table,
                                   const SummaryTable& summaries) {
  const auto layer = static_cast<int>(blockIdx.x / 2);
  return {table.batch, table.layers[layer], summaries, layer};
}

// The numbers of a warp's units. Neighbouring ones go to neighbouring thread blocks of the layer's
// two planes, which are not on one SM.
struct UnitNumbers {
  uint32_t block = 2 * blockIdx.y + blockIdx.x % 2;
  uint32_t num_blocks = 2 * gridDim.y;

  // How many the summary warps take at a time, and which is this one's. None if a warp cannot read
  // K of a unit quickly and at once: then all are others'.
  __device__ uint32_t NumOwn(const SummaryTable& table, const BlockRoles& roles) const {
    return table.quick ? static_cast<uint32_t>(roles.summaries / 32) * num_blocks : 0;
  }
  __device__ uint32_t Own(const BlockRoles& roles) const {
    return block + (threadIdx.x - static_cast<uint32_t>(roles.rows)) / 32 * num_blocks;
  }
  // Of the rest, the first of any warp, and how far the next one is.
  __device__ uint32_t FirstOther(uint32_t num_before) const {
    return num_before + block + threadIdx.x / 32 * num_blocks;
  }
  __device__ uint32_t Step(const BlockRoles& roles) const {
    return static_cast<uint32_t>((roles.rows + roles.summaries) / 32) * num_blocks;
  }
};

// What a warp does that has done its own. REQUIRES: the batch is valid.
template <uint32_t kOwn, int kLayers>
__device__ __noinline__ void SummarizeOthers(const CommitTable<kLayers>& table,
                                             const SummaryTable& summaries, BlockRoles roles) {
  const LayerSummaries layer = {UnitsOfBlock(table, summaries)};
  const LaneBlocks blocks = layer.FindBlocks(LaneRequests(table.batch, summaries, 0), 0);
  const UnitNumbers numbers;
#pragma unroll 1
  for (uint32_t number = numbers.FirstOther(kOwn * numbers.NumOwn(summaries, roles));;
       number += numbers.Step(roles)) {
    const SummaryUnit unit = layer.Find(number, blocks);
    if (unit.request < 0) return;
    layer.Summarize(unit);
  }
}

// Where the warps that move rows learn whether there are others. In shared memory.
class SummaryHelp {
 public:
  // By the summary warps, once, and early: where validation has a warp of its own, those that move
  // rows hear it with the verdict.
  __device__ void Tell(bool others, const BlockRoles& roles) {
    if (threadIdx.x == static_cast<unsigned>(roles.rows)) others_ = others;
    if (roles.apart > 0) {
      ArriveAt(kVerdictForRows, roles.told());
    } else {
      ArriveAt(kSummaryHelp, roles.rows + roles.summaries);
    }
  }
  // After the verdict.
  __device__ bool Await(const BlockRoles& roles) const {
    if (roles.apart == 0) MeetAt(kSummaryHelp, roles.rows + roles.summaries);
    return others_;
  }

 private:
  bool others_;
};

// What a summary warp does: up to kOwn units. Nothing is written unless the verdict allows it;
// until it is there, what is read is within bounds and goes nowhere. Returns whether there are
// others, for all warps.
template <typename Entries, uint32_t kOwn, int kLayers>
__device__ bool CompleteSummaries(const CommitTable<kLayers>& table, const SummaryTable& summaries,
                                  const BlockRoles& roles, VerdictPost& post, SummaryHelp& help) {
  constexpr bool kFew = Entries::kKnown;
  __shared__ UnitKeys<kOwn> keys_of_warps[kFew ? kMaxSummaryWarps : 1];
  const LaneRequests requests(table.batch, summaries, 0);
  const Entries entries(table.batch);
  const LayerUnits layer = UnitsOfBlock(table, summaries);
  const LaneBlocks blocks = layer.FindBlocks(requests, 0);
  if (blocks.total == 0 && (kFew || NumRequests(table.batch) <= 32)) {  // as in partial steps
    help.Tell(false, roles);
    post.DoWithout(roles);
    return false;
  }
  const UnitNumbers numbers;
  const uint32_t num_own = numbers.NumOwn(summaries, roles);
  const bool others = layer.template FindEarly<kFew>(kOwn * num_own, blocks).request >= 0;
  help.Tell(others, roles);
  UnitsInFlight<Entries, kOwn> units(
      layer, entries, keys_of_warps[(threadIdx.x - static_cast<uint32_t>(roles.rows)) / 32]);
#pragma unroll 1
  for (uint32_t turn = 0; num_own > 0 && turn < kOwn; ++turn) {
    const SummaryUnit unit =
        layer.template FindEarly<kFew>(numbers.Own(roles) + turn * num_own, blocks);
    if (unit.request < 0) break;
    units.Fetch(unit);
  }
  const bool valid = post.AwaitLate(roles).fault == kNoFault;
  units.Await();
  if (valid) units.Complete();
  return valid && others;
}

}  // namespace nwor
