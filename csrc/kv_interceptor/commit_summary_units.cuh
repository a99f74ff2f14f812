#pragma once

#include <cstdint>

#include "kv_interceptor/commit_grid.h"
#include "kv_interceptor/commit_summaries.cuh"
#include "kv_interceptor/commit_table.cuh"

// Which blocks a commit completes, as the lanes of a warp find out together, and where K of their
// tokens lies. Every trip to memory counts: what depends on nothing is asked for at once, and what
// a lane knows is asked of it instead of memory.

namespace nwor {

// One head of one completed block. Blocks with a page out of range are left out.
struct SummaryUnit {
  int32_t request = -1;  // < 0: there is none
  int32_t row;           // < 0: a page of it is out of range
  int32_t block;
  int32_t head;
  int32_t cached;  // tokens of the request in the cache before this commit
  int32_t page;    // that the whole block lies in, < 0: not known
};

// What a warp's lanes know of the entries of a small batch, two each.
class LaneEntries {
 public:
  LaneEntries() = default;
  __device__ explicit LaneEntries(const BatchTable& batch)
      : known_(batch.depth > 0 && batch.num_positions <= 32 * kPerLane) {
    const int64_t* slots = batch.groups[0].slots;
    knows_slots_ = known_ && slots != nullptr;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int32_t position = i * 32 + static_cast<int32_t>(threadIdx.x % 32);
      if (!known_ || position >= batch.num_positions) continue;
      path_[i] = batch.path[position];
      if (knows_slots_) slot_[i] = slots[position];
    }
  }

  __device__ bool known() const { return known_; }
  __device__ bool knows_slots() const { return knows_slots_; }
  // Of any entry, which may differ from lane to lane. All lanes call it.
  __device__ int32_t PathEntry(int32_t position) const { return Ask(path_, position); }
  __device__ int64_t Slot(int32_t position) const { return Ask(slot_, position); }

 private:
  static constexpr int kPerLane = kSmallCommitEntries / 32;
  static_assert(kPerLane == 2);

  template <typename T>
  __device__ static T Ask(const T (&of)[kPerLane], int32_t position) {
    const T low = __shfl_sync(0xffffffff, of[0], position % 32);
    const T high = __shfl_sync(0xffffffff, of[1], position % 32);
    return position < 32 ? low : high;
  }

  bool known_ = false, knows_slots_ = false;
  int32_t path_[kPerLane] = {-1, -1};
  int64_t slot_[kPerLane] = {-1, -1};
};

// What a warp's lanes know of the requests `base` to base + 31, one each.
struct LaneRequests {
  SummaryLengths lengths;  // without the row where rows are not given
  int32_t count = -1;

  LaneRequests() = default;
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
  CompletedBlocks own;
  int32_t cached = 0;
  int32_t page = -1;  // of the first one, < 0: not known

  __device__ uint32_t num_blocks() const {
    return static_cast<uint32_t>(max(own.last - own.first, 0));
  }
};

// The units of one layer. All lanes of a warp call its methods together.
struct LayerUnits {
  const BatchTable& batch;
  const LayerTable& layer;
  const SummaryTable& table;
  int layer_idx;

  // The batch need not be valid: counts beyond the depth complete nothing.
  __device__ LaneBlocks FindBlocks(const LaneRequests& requests, int32_t base) const {
    LaneBlocks blocks;
    SummaryLengths lengths = requests.lengths;
    if (table.to.rows == nullptr) lengths.row = base + static_cast<int32_t>(threadIdx.x % 32);
    if (requests.count >= 0 && requests.count <= batch.depth) {
      blocks.own = FindCompleted(table.to, lengths, requests.count, table.block_shift);
    }
    blocks.cached = lengths.cached;
    return blocks;
  }
  // The same for the first 32, with the page of each lane's first block: on its way when this
  // returns, or told by the slot of the row that completes the block.
  __device__ LaneBlocks FindBlocks(const LaneRequests& requests, const LaneEntries& entries) const {
    LaneBlocks blocks = FindBlocks(requests, 0);
    const Pages& pages = batch.groups[0].pages;
    const auto request = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t first = FirstToken(blocks.own.first), last = first + table.to.block_size - 1;
    const int32_t page_idx = PageOf(pages, last), index = last - blocks.cached;
    const int64_t slot = entries.Slot(request * batch.depth + index);
    if (blocks.num_blocks() == 0 || PageOf(pages, first) != page_idx) return blocks;
    if (entries.knows_slots() && index >= 0) {
      if (slot >= 0 && slot < pages.num_slots)
        blocks.page = static_cast<int32_t>(PageOf(pages, slot));
    } else if (page_idx < table.to.max_pages) {
      blocks.page = table.to.block_table[request * table.to.table_stride + page_idx];
    }
    return blocks;
  }

  // The unit of that number. `blocks`: of the first 32 requests.
  __device__ SummaryUnit Find(uint32_t number, LaneBlocks blocks) const {
    const auto num_heads = static_cast<uint32_t>(table.num_heads);
    uint32_t wanted = number / num_heads;  // of all blocks
    const uint32_t lanes_below = (1u << threadIdx.x % 32) - 1;
#pragma unroll 1
    for (int32_t base = 0; base < NumRequests(batch); base += 32) {
      if (base > 0) blocks = FindBlocks(LaneRequests(batch, table, base), base);
      const uint32_t num_own = blocks.num_blocks();
      uint32_t before = 0, num_blocks = 0;  // of lanes below, of all lanes; a bit at a time
#pragma unroll 1
      for (int bit = 0; __any_sync(0xffffffff, num_own >> bit != 0); ++bit) {
        const uint32_t lanes = __ballot_sync(0xffffffff, (num_own >> bit & 1) != 0);
        before += static_cast<uint32_t>(__popc(lanes & lanes_below)) << bit;
        num_blocks += static_cast<uint32_t>(__popc(lanes)) << bit;
      }
      if (wanted < num_blocks) {
        const int source = 31 - __clz(__ballot_sync(0xffffffff, num_own > 0 && before <= wanted));
        const auto of = [source](int32_t value) { return __shfl_sync(0xffffffff, value, source); };
        const auto at = static_cast<int32_t>(wanted) - of(static_cast<int32_t>(before));
        const int32_t page = of(blocks.page);
        return {base + source,
                of(blocks.own.row),
                of(blocks.own.first) + at,
                static_cast<int32_t>(number % num_heads),
                of(blocks.cached),
                at == 0 ? page : -1};
      }
      wanted -= num_blocks;
    }
    return {};
  }

  // K of at most `count` tokens, no more than lanes, from the block's token `first` on.
  __device__ LaneRows KeyRows(const SummaryUnit& unit, const LaneEntries& entries, int32_t first,
                              int32_t count) const {
    count = min(count, table.to.block_size - first);
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t token = FirstToken(unit.block) + first + lane;
    const int32_t position = unit.request * batch.depth + token - unit.cached;
    const int32_t entry = entries.PathEntry(position);
    if (lane >= count) return {nullptr, count};
    const bool is_cached = token < unit.cached;
    int32_t name = is_cached ? unit.page : entry;
    if (is_cached ? unit.page < 0 : !entries.known())
      name = LoadName(unit.request, token, position, is_cached);
    const char* row = is_cached ? CachedKey(batch, layer, table, token, unit.head, name)
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
    const int32_t page_idx = PageOf(batch.groups[0].pages, token);
    const int32_t* named = is_cached
                               ? table.to.block_table + request * table.to.table_stride + page_idx
                               : batch.path + position;
    return is_cached && page_idx >= table.to.max_pages ? -1 : *named;
  }
};

}  // namespace nwor
