#pragma once

#include <cstdint>

#include "kv_interceptor/commit_grid.h"
#include "kv_interceptor/commit_summaries.cuh"
#include "kv_interceptor/commit_table.cuh"

// Which blocks a commit completes, as the lanes of a warp find out together, and where K of their
// tokens lies. Every trip to memory counts: what depends on nothing is asked for at once.

namespace nwor {

// One head of one completed block. Blocks with a page out of range are left out (LaneRows::whole).
struct SummaryUnit {
  int32_t request = -1;  // < 0: there is none
  int32_t row;
  int32_t block;
  int32_t head;
  int32_t cached;  // tokens of the request in the cache before this commit
};

// The path and the slots of a batch of at most kSmallCommitEntries, in the registers of a warp.
class SmallEntries {
 public:
  static constexpr bool kKnown = true;

  // Loads depend on nothing but the position, and nothing here waits for them.
  __device__ explicit SmallEntries(const BatchTable& batch) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int32_t position = static_cast<int32_t>(threadIdx.x % 32) + i * 32;
      if (batch.depth == 0 || position >= batch.num_positions) continue;
      path_[i] = batch.path[position];
      if (batch.groups[0].slots != nullptr) slot_[i] = batch.groups[0].slots[position];
    }
  }

  // All lanes call these together. `position` may differ from lane to lane, or be of none.
  __device__ int32_t path_entry(int32_t position) const {
    const int32_t low = __shfl_sync(0xffffffff, path_[0], position);
    const int32_t high = __shfl_sync(0xffffffff, path_[1], position);
    return position < 32 ? low : high;
  }
  // The same `position` in all lanes. REQUIRES: the batch has slots.
  __device__ int64_t slot(int32_t position) const {
    return __shfl_sync(0xffffffff, position < 32 ? slot_[0] : slot_[1], position);
  }

 private:
  static constexpr int kPerLane = kSmallCommitEntries / 32;
  static_assert(kPerLane == 2);
  int32_t path_[kPerLane] = {-1, -1};
  int64_t slot_[kPerLane] = {-1, -1};
};

// Where there are more of them, and nothing is known.
struct NoEntries {
  static constexpr bool kKnown = false;
  NoEntries() = default;
  __device__ explicit NoEntries(const BatchTable&) {}
};

// What a warp's lanes know of the requests `base` to base + 31, one each.
struct LaneRequests {
  SummaryLengths lengths;  // without the row where rows are not given
  int32_t count = -1;

  // Loads depend on nothing but the number of the request, and nothing here waits for them.
  __device__ LaneRequests(const BatchTable& batch, const SummaryTable& table, int32_t base) {
    const int32_t request = base + static_cast<int32_t>(threadIdx.x % 32);
    if (request >= NumRequests(batch)) return;
    count = batch.counts[request];
    lengths.full = table.to.full_lens[request];
    lengths.cached = table.to.cached_lens[request];
    if (table.to.rows != nullptr) lengths.row = table.to.rows[request];
  }
};

// The blocks that these requests complete, each lane its request's.
struct LaneBlocks {
  int32_t row;      // of the request's summaries
  int32_t cached;   // tokens of the request in the cache before this commit
  uint32_t before;  // blocks of lanes below; kNone: this lane has none
  int32_t origin;   // its block n of all is the request's block origin + n
  uint32_t total;   // of all lanes
  static constexpr uint32_t kNone = 0xffffffff;
};

// The units of one layer. All lanes of a warp call its methods together. kShift: the page size is a
// power of two.
template <bool kShift>
struct LayerUnits {
  const BatchTable& batch;
  const LayerTable& layer;
  const SummaryTable& table;
  int layer_idx;

  // The batch need not be valid: counts beyond the depth complete nothing.
  __device__ LaneBlocks FindBlocks(const LaneRequests& requests, int32_t base) const {
    SummaryLengths lengths = requests.lengths;
    if (table.to.rows == nullptr) lengths.row = base + static_cast<int32_t>(threadIdx.x % 32);
    CompletedBlocks own;
    if (requests.count >= 0 && requests.count <= batch.depth) {
      own = FindCompleted(table.to, lengths, requests.count, table.block_shift);
    }
    const auto num_own = static_cast<uint32_t>(max(own.last - own.first, 0));
    const uint32_t lanes_below = (1u << threadIdx.x % 32) - 1;
    uint32_t before = 0, total = 0;
#pragma unroll 1
    for (int bit = 0; __any_sync(0xffffffff, num_own >> bit != 0); ++bit) {
      const uint32_t lanes = __ballot_sync(0xffffffff, (num_own >> bit & 1) != 0);
      before += static_cast<uint32_t>(__popc(lanes & lanes_below)) << bit;
      total += static_cast<uint32_t>(__popc(lanes)) << bit;
    }
    return {own.row, lengths.cached, num_own > 0 ? before : LaneBlocks::kNone,
            own.first - static_cast<int32_t>(before), total};
  }

  // The unit of that number: heads of a block follow each other. `blocks`: of the first 32
  // requests.
  __device__ SummaryUnit Find(uint32_t unit, const LaneBlocks& blocks) const {
    const auto num_heads = static_cast<uint32_t>(table.num_heads);
    return Find(unit / num_heads, static_cast<int32_t>(unit % num_heads), blocks);
  }
  // The same, quicker. REQUIRES: unit * num_heads < 2^32. kFew: there are no more than 32 requests.
  template <bool kFew>
  __device__ SummaryUnit FindEarly(uint32_t unit, const LaneBlocks& blocks) const {
    const uint32_t number = Divide(unit, table.by_heads);
    const int32_t head =
        static_cast<int32_t>(unit) - static_cast<int32_t>(number) * table.num_heads;
    if constexpr (!kFew) return Find(number, head, blocks);
    return number < blocks.total ? Take(number, head, blocks, 0) : SummaryUnit();
  }
  __device__ SummaryUnit Find(uint32_t number, int32_t head, LaneBlocks blocks) const {
#pragma unroll 1
    for (int32_t base = 0;;) {
      if (number < blocks.total) return Take(number, head, blocks, base);
      number -= blocks.total;
      base += 32;
      if (base >= NumRequests(batch)) return {};
      blocks = FindBlocks(LaneRequests(batch, table, base), base);
    }
  }

  // Of the requests from `base` on. REQUIRES: number < blocks.total.
  __device__ static SummaryUnit Take(uint32_t number, int32_t head, const LaneBlocks& blocks,
                                     int32_t base) {
    const int source = 31 - __clz(__ballot_sync(0xffffffff, blocks.before <= number));
    const auto of = [source](int32_t value) { return __shfl_sync(0xffffffff, value, source); };
    return {base + source, of(blocks.row), of(blocks.origin) + static_cast<int32_t>(number), head,
            of(blocks.cached)};
  }

  // The page of the unit's block, if the slot of the block's last token tells it, or -1.
  template <typename Entries>
  __device__ int32_t KnownPage(const SummaryUnit& unit, const Entries& entries) const {
    if constexpr (Entries::kKnown) {
      const GroupTable& group = batch.groups[0];
      const int32_t index = FirstToken(unit.block) + table.to.block_size - 1 - unit.cached;
      if (index < 0 || !table.in_pages || group.slots == nullptr) return -1;
      const int64_t slot = entries.slot(unit.request * batch.depth + index);
      if (slot < 0 || slot >= group.pages.num_slots) return -1;
      return static_cast<int32_t>(PageOf<kShift>(group.pages, slot));
    }
    return -1;
  }

  // K of at most `count` tokens, no more than lanes, from the block's token `first` on. `page`: the
  // block's, if it is known, or -1.
  template <typename Entries>
  __device__ LaneRows KeyRows(const SummaryUnit& unit, int32_t page, const Entries& entries,
                              int32_t first, int32_t count) const {
    count = min(count, table.to.block_size - first);
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t token = FirstToken(unit.block) + first + lane;
    const int32_t position = unit.request * batch.depth + token - unit.cached;
    const bool is_cached = token < unit.cached;
    int32_t name = page;
    if constexpr (Entries::kKnown) {
      const int32_t entry = entries.path_entry(position);
      if (!is_cached) name = entry;
    }
    if (lane >= count) return {nullptr, count};
    if (is_cached ? page < 0 : !Entries::kKnown) {
      name = LoadName(unit.request, token, position, is_cached);
    }
    const char* row = is_cached ? CachedKey<kShift>(batch, layer, table, token, unit.head, name)
                                : StagedKey(batch, layer, unit.request, unit.head, name);
    return {row, count};
  }
  __device__ int32_t FirstToken(int32_t block) const {
    return table.to.start_token + block * table.to.block_size;
  }

 private:
  // A page or a path entry, by one load: lanes with the one do not wait for those with the other.
  __device__ int32_t LoadName(int32_t request, int32_t token, int32_t position,
                              bool is_cached) const {
    const int32_t page_idx = PageOf<kShift>(batch.groups[0].pages, token);
    const int32_t* named = is_cached
                               ? table.to.block_table + request * table.to.table_stride + page_idx
                               : batch.path + position;
    return is_cached && page_idx >= table.to.max_pages ? -1 : *named;
  }
};

}  // namespace nwor
