#pragma once

#include <cstdint>

#include "kv_interceptor/commit/grid.h"
#include "kv_interceptor/commit/summaries.cuh"
#include "kv_interceptor/commit/table.cuh"

// Which blocks a commit completes, as the lanes of a warp find out together, and where K of their
// tokens lies. Every trip to memory counts: what depends on nothing is asked for at once.

namespace nwor {

// One head of one completed block. Blocks with a page out of range are left out (AllThere).
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

// The units of one layer. All lanes of a warp call its methods together.
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

  // K of the lane's token, from the block's token `first` on. Null: its page or its row does not
  // exist, or it is beyond the block.
  __device__ const char* KeyRow(const SummaryUnit& unit, int32_t first) const {
    const int32_t token = FirstToken(unit.block) + first + Lane();
    const int32_t position = unit.request * batch.depth + token - unit.cached;
    if (first + Lane() >= table.to.block_size) return nullptr;
    if (token >= unit.cached) return StagedKey(unit, batch.path[position]);
    const int32_t page_idx = PageOf(batch.groups[0].pages, token);
    return CachedKey(unit, token, page_idx, LoadPage(unit.request, page_idx));
  }
  __device__ int32_t FirstToken(int32_t block) const {
    return table.to.start_token + block * table.to.block_size;
  }

  // The page of one of a request's tokens, -1: it has none.
  __device__ int32_t LoadPage(int32_t request, int32_t page_idx) const {
    if (page_idx >= table.to.max_pages) return -1;
    return table.to.block_table[request * table.to.table_stride + page_idx];
  }

 private:
  __device__ static int32_t Lane() { return static_cast<int32_t>(threadIdx.x % 32); }

  // Null when there is no such page or, in a batch that is not valid, no such row.
  __device__ const char* CachedKey(const SummaryUnit& unit, int32_t token, int32_t page_idx,
                                   int32_t page) const {
    const GroupTable& group = batch.groups[0];
    if (page < 0 || page >= table.num_pages) return nullptr;
    const int32_t in_page = token - page_idx * group.pages.page_size;
    return layer.cache[0] + page * group.cache[0].page + in_page * group.cache[0].token +
           unit.head * group.cache[0].head;
  }
  __device__ const char* StagedKey(const SummaryUnit& unit, int32_t path_entry) const {
    const GroupTable& group = batch.groups[0];
    const int64_t staged = StagingRow(batch, unit.request, path_entry);
    if (staged < 0) return nullptr;
    return group.staged[0].data + layer.staged_layer * group.staged_layer[0] +
           staged * group.staged[0].row + unit.head * group.staged[0].head;
  }
};

}  // namespace nwor
