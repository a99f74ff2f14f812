#pragma once

#include <cuda_pipeline_primitives.h>

#include <algorithm>
#include <cstdint>

#include "kv_interceptor/commit/grid.h"
#include "kv_interceptor/commit/summaries.cuh"
#include "kv_interceptor/commit/summary_units.cuh"
#include "kv_interceptor/commit/table.cuh"
#include "kv_interceptor/extremes.cuh"

// Units of which a warp reads K at once: it asks for that of several, while the batch is validated,
// and completes them from shared memory. Few branches and short chains of instructions are what
// counts here: a warp that runs this once spends more cycles on them than on K.

namespace nwor {

// In shared memory.
template <uint32_t kOwn>
struct UnitKeys {
  const char* row_of[32];  // K of each token of the unit that is being asked for
  uint64_t out_at[kOwn];
  uint4 packets[kOwn][kPartPackets][32];  // a lane reads only what it copied itself
};
inline constexpr int64_t kSummaryBytes = std::max(
    kMaxSummaryWarps * sizeof(UnitKeys<kSmallSummaryUnits>), sizeof(UnitKeys<kSummaryUnits>));

// All lanes of a warp call its methods together.
template <typename Entries, uint32_t kOwn>
class UnitsInFlight {
 public:
  __device__ UnitsInFlight(const LayerUnits& layer, const Entries& entries, UnitKeys<kOwn>& keys)
      : layer_(layer), entries_(entries), keys_(keys), place_(layer.table.pairs) {
    const GroupTable& group = layer.batch.groups[0];
    staged_ = group.staged[0].data + layer.layer.staged_layer * group.staged_layer[0];
  }

  // Asks for K, unless some of it does not exist.
  __device__ void Fetch(const SummaryUnit& unit) {
    const SummaryTable& table = layer_.table;
    const ShortStrides& strides = table.strides;
    const char* row = KeyRow(unit);
    if (!AllThere(row, table.to.block_size)) return;
    keys_.row_of[Lane()] = row;
    const uint64_t out_at = uint64_t{static_cast<uint32_t>(unit.row)} * strides.out_row +
                            uint64_t{static_cast<uint32_t>(unit.block)} * strides.out_block +
                            uint64_t{static_cast<uint32_t>(unit.head)} * strides.out_head;
    if (Lane() == 0) keys_.out_at[count_] = out_at;
    __syncwarp();
#pragma unroll 1
    for (int32_t first = 0; first < table.pairs.num_packets; first += kAtOnce) {
#pragma unroll
      for (int32_t i = first; i < first + kAtOnce; ++i) {
        // The last row again instead of none: extremes do not mind.
        const int32_t token =
            min(i * table.pairs.rows_at_once + place_.row, table.to.block_size - 1);
        __pipeline_memcpy_async(&keys_.packets[count_][i][Lane()],
                                keys_.row_of[token] + place_.byte, sizeof(uint4));
      }
    }
    __syncwarp();
    ++count_;
  }

  // Until all of it is there. The thread block must not end before.
  __device__ void Await() const {
    __pipeline_commit();
    __pipeline_wait_prior(0);
  }

  // REQUIRES: the batch is valid, and nothing is on its way.
  __device__ void Complete() const {
    if (layer_.table.row_dtype == DType::kFloat16) return CompleteAs<__half>();
    CompleteAs<__nv_bfloat16>();
  }

 private:
  static constexpr int32_t kAtOnce = 4;
  static_assert(kPartPackets % kAtOnce == 0);

  __device__ static int32_t Lane() { return static_cast<int32_t>(threadIdx.x % 32); }

  // The page of the unit's block, if the slot of the block's last token tells it, or -1.
  __device__ int32_t KnownPage(const SummaryUnit& unit, int32_t first_token) const {
    if constexpr (Entries::kKnown) {
      const BatchTable& batch = layer_.batch;
      const int32_t index = first_token + layer_.table.to.block_size - 1 - unit.cached;
      if (index < 0 || !layer_.table.in_pages || batch.groups[0].slots == nullptr) return -1;
      const int64_t slot = entries_.slot(unit.request * batch.depth + index);
      const bool exists = slot >= 0 && slot < batch.groups[0].pages.num_slots;
      return exists ? static_cast<int32_t>(slot >> batch.groups[0].pages.page_shift) : -1;
    }
    return -1;
  }

  // K of the lane's token: before the commit it is in the cache, otherwise in staging. Null: there
  // is no such page or, in a batch that is not valid, no such row; or no such token.
  __device__ const char* KeyRow(const SummaryUnit& unit) const {
    const BatchTable& batch = layer_.batch;
    const Pages& pages = batch.groups[0].pages;
    const ShortStrides& strides = layer_.table.strides;
    const int32_t first = layer_.FirstToken(unit.block), token = first + Lane();
    const int32_t position = unit.request * batch.depth + token - unit.cached;
    const bool within = Lane() < layer_.table.to.block_size;
    const bool is_cached = token < unit.cached;
    int32_t page = KnownPage(unit, first), entry = -1;
    if constexpr (Entries::kKnown) entry = entries_.path_entry(position);
    if (within && is_cached && page < 0) {
      page = layer_.LoadPage(unit.request, token >> pages.page_shift);
    }
    if (!Entries::kKnown && within && !is_cached) entry = batch.path[position];
    const auto head = static_cast<uint32_t>(unit.head);
    if (is_cached) {
      if (page < 0 || page >= layer_.table.num_pages) return nullptr;
      const auto in_page = static_cast<uint32_t>(token & (pages.page_size - 1));
      return layer_.layer.cache[0] + uint64_t{static_cast<uint32_t>(page)} * strides.page +
             uint64_t{in_page} * strides.token + uint64_t{head} * strides.head;
    }
    const int32_t staged = within ? StagingRow(batch, unit.request, entry) : -1;
    if (staged < 0) return nullptr;
    return staged_ + uint64_t{static_cast<uint32_t>(staged)} * strides.staged_row +
           uint64_t{head} * strides.staged_head;
  }

  template <typename T>
  __device__ void CompleteAs() const {
    const SummaryTable& table = layer_.table;
    const int64_t layer_at = layer_.layer_idx * table.to.layer_stride;
    char* kmax = reinterpret_cast<char*>(static_cast<T*>(table.to.kmax) + layer_at) + place_.byte;
    char* kmin = reinterpret_cast<char*>(static_cast<T*>(table.to.kmin) + layer_at) + place_.byte;
#pragma unroll 1
    for (int32_t unit = 0; unit < count_; ++unit) {
      PairExtremes<T> extremes;
#pragma unroll 1
      for (int32_t first = 0; first < table.pairs.num_packets; first += kAtOnce) {
        uint4 packets[kAtOnce];
#pragma unroll
        for (int32_t i = 0; i < kAtOnce; ++i) packets[i] = keys_.packets[unit][first + i][Lane()];
#pragma unroll
        for (int32_t i = 0; i < kAtOnce; ++i) {
          extremes.Add({{packets[i].x, packets[i].y, packets[i].z, packets[i].w}}, 1.0f);
        }
      }
      MeetRows(extremes, table.pairs, place_.row);
      if (place_.row != 0) continue;
      const uint64_t at = keys_.out_at[unit];
      extremes.Store(reinterpret_cast<T*>(kmax + at), reinterpret_cast<T*>(kmin + at));
    }
  }

  const LayerUnits& layer_;
  const Entries& entries_;
  UnitKeys<kOwn>& keys_;
  const PairPlace place_;
  const char* staged_;
  int32_t count_ = 0;
};

}  // namespace nwor
