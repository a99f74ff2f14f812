#pragma once

#include "attention/cuda/combine.cuh"
#include "attention/cuda/status.cuh"

// A work item from the queue to shared memory, and what happens when all are done: what all verify
// kernels have in common. A Traits type here has Row, kFloat8, kHeadDim, kRowTile, kThreads and
// Meet, a barrier for the CTA's kThreads first threads.

namespace nwor {

// Where the ids of the item's pages or blocks are. Called by one thread.
__device__ inline void MapIds(const VerifyArgs& args, SharedItem* item) {
  const VerifyParams& p = args.params;
  const PlanItem& plan = item->plan;
  TokenMap& map = item->tokens;
  map.ids = nullptr;
  map.unit_tokens = map.units_per_page = Divisor{};
  if (plan.source == TokenSource::kBlocks) {
    const int64_t list = int64_t{plan.request} * p.num_kv_heads + plan.kv_head;
    map.ids = p.view.blocks + list * p.view.max_blocks;
    map.unit_tokens = args.block_tokens;
    map.units_per_page = args.blocks_per_page;
  } else if (plan.source == TokenSource::kPages) {
    map.ids = p.block_table + plan.request * p.table_stride;
    map.unit_tokens = args.page_tokens;
  }
}

template <class Traits>
__device__ void MapTokens(const VerifyArgs& args, SharedItem* item) {
  const VerifyParams& p = args.params;
  const PlanItem& plan = item->plan;
  TokenMap& map = item->tokens;
  map.num_pages = p.cache.geometry.num_pages;
  const int64_t head = plan.kv_head;
  if (plan.source == TokenSource::kCompact) {
    const int64_t base = plan.request * p.compact.batch_stride + head * p.compact.head_stride;
    map.keys = static_cast<const char*>(p.compact.keys) + base * 2;
    map.values = static_cast<const char*>(p.compact.values) + base * 2;
    map.key_page = map.value_page = 0;
    map.key_token = map.value_token = p.compact.token_stride * 2;
    return;
  }
  constexpr int kBytes = Traits::kFloat8 ? 1 : 2;
  const CacheGeometry& g = p.cache.geometry;
  map.keys = static_cast<const char*>(p.cache.key) + head * g.key.head * kBytes;
  map.values = static_cast<const char*>(p.cache.value) + head * g.value.head * kBytes;
  map.key_page = g.key.page * kBytes;
  map.value_page = g.value.page * kBytes;
  map.key_token = g.key.token * kBytes;
  map.value_token = g.value.token * kBytes;
}

__device__ inline float HeadScale(const float* scales, int count, int head) {
  return scales == nullptr ? 1.0f : scales[count > 1 ? head : 0];
}

// The least of normal floats: times any score as good as 0.
inline constexpr float kLeastScale = 1.17549435e-38f;

// What follows from item->plan, after MapIds. Called by one thread.
template <class Traits>
__device__ void PrepareItem(const VerifyArgs& args, SharedItem* item) {
  const VerifyParams& p = args.params;
  const PlanItem& plan = item->plan;
  MapTokens<Traits>(args, item);
  const float scale = p.scale * 1.4426950408889634f;
  item->tail_scale = scale;
  item->prefix_scale = scale;
  item->value_scale = 1.0f;
  item->cap_outer = p.softcap * 1.4426950408889634f;
  item->cap_inner = p.softcap == 0.0f ? 0.0f : 2.0f / p.softcap;
  if (Traits::kFloat8 && plan.source != TokenSource::kCompact) {
    const KvScales& scales = p.cache.scales;
    const float prefix_scale = scale * HeadScale(scales.key, scales.key_count, plan.kv_head);
    // A masked score times 0 would be NaN.
    item->prefix_scale = prefix_scale == 0.0f ? kLeastScale : prefix_scale;
    item->value_scale = HeadScale(scales.value, scales.value_count, plan.kv_head);
  }
}

// Where a row of the item stands among the tokens.
__device__ inline int RowPosition(const VerifyArgs& args, const PlanItem& plan, int row) {
  const int query_row = min(args.group.Quotient(plan.row_begin + row), plan.request_rows - 1);
  return plan.prefix_tokens + RowDepth(args.params, plan, query_row);
}

// Brings item `index` and what follows from it to shared memory, the rows' positions too if a
// window asks for them. Called by the whole CTA, which must meet before it reads more than
// item->plan.
template <class Traits>
__device__ void OpenItem(const VerifyArgs& args, int index, SharedItem* item, int32_t* positions) {
  if (threadIdx.x < sizeof(PlanItem) / sizeof(int4)) {
    reinterpret_cast<int4*>(&item->plan)[threadIdx.x] =
        reinterpret_cast<const int4*>(args.items + index)[threadIdx.x];
  }
  __syncthreads();
  const PlanItem& plan = item->plan;
  if (plan.request < 0) return;
  if (threadIdx.x == 0) {
    MapIds(args, item);
    PrepareItem<Traits>(args, item);
  }
  if (args.params.window > 0 && threadIdx.x < Traits::kRowTile) {
    positions[threadIdx.x] = RowPosition(args, plan, threadIdx.x);
  }
}

// Where a block of 16 prefix tokens lies: a page and its first token there; the request and a token
// of its compact view. A block past the end, or in a page that does not exist, is given some place
// that can be read.
struct BlockPlace {
  int page, token;
};
// The id of the page or block that `token` lies in; anything past `end`.
__device__ inline int ReadId(const SharedItem& item, int token, int end) {
  const TokenMap& map = item.tokens;
  return map.ids != nullptr && token < end ? map.ids[map.unit_tokens.Quotient(token)] : 0;
}
__device__ inline BlockPlace PlaceOf(const VerifyArgs& args, const SharedItem& item, int token,
                                     int id) {
  const TokenMap& map = item.tokens;
  if (map.ids == nullptr) return {item.plan.request, token};
  const int unit_tokens = map.unit_tokens.value;
  const int page = map.units_per_page.Quotient(id);
  if (id < 0 || page >= map.num_pages) {
    ReportError(args.params.status, VerifyStatus::kBadPage, item.plan.request, id);
    return {0, 0};
  }
  const int part = id - page * static_cast<int>(map.units_per_page.value);
  return {page, part * unit_tokens + token - map.unit_tokens.Quotient(token) * unit_tokens};
}

// The same as byte offsets from the map's keys and values.
struct BlockOffsets {
  int64_t key, value;
};
__device__ inline BlockOffsets LocateBlock(const VerifyArgs& args, const SharedItem& item,
                                           int token, int id) {
  const TokenMap& map = item.tokens;
  const BlockPlace at = PlaceOf(args, item, token, id);
  const int64_t page = map.ids == nullptr ? 0 : at.page;
  return {page * map.key_page + at.token * map.key_token,
          page * map.value_page + at.token * map.value_token};
}

// In-flight rows that the rows of an item may see in a leaf: only the last leaf has them. Without a
// mask no row of the tile sees past its own last query row.
__device__ inline int TailRows(const VerifyParams& p, const PlanItem& item, int leaf) {
  if (leaf + 1 != item.num_leaves) return 0;
  if (p.tree_mask != nullptr) return item.request_rows;
  return (item.row_begin + item.num_rows - 1) / (p.num_heads / p.num_kv_heads) + 1;
}

// Tells the others that this CTA runs and has a first item. Called by one thread.
__device__ inline void ReportStart(const VerifyArgs& args, const LaunchCounts& counts) {
  if (counts.num_split_pairs > 0) atomicAdd(&args.counters->round[counts.launch % 2].started, 1);
}

// Asks for an item after the CTA's first one; the number is final once SettleItem has been called
// with it. Every item asks once: the last to ask prepares the next launch. Called by one thread.
__device__ inline uint32_t AskForItem(const VerifyArgs& args) {
  return atomicAdd(&args.counters->fetches, 1);
}
__device__ inline int SettleItem(const VerifyArgs& args, const LaunchCounts& counts,
                                 uint32_t fetch) {
  WorkCounters& counters = *args.counters;
  const int index = static_cast<int>(fetch - counts.fetch_base);
  if (index == counts.num_items - 1) {
    counters.round[(counts.launch + 1) % 2] = {};
    counters.launch = counts.launch + 1;
    counters.fetch_base = counts.fetch_base + counts.num_items;
  }
  const int next = index + static_cast<int>(gridDim.x);
  return next < counts.num_items ? next : -1;
}

// Takes items from the queue until it is empty. process() works on the one in `item`, up to its
// output or partial result; the combine has `buffer`. Called by the whole CTA.
template <class Traits, typename Process>
__device__ void ServeQueue(const VerifyArgs& args, SharedItem* item, int32_t* positions,
                           const CombineBuffer& buffer, Process process) {
  LaunchCounts counts;
  if (threadIdx.x == 0) counts.Read(args);
  int index = blockIdx.x;
  int num_items = 0;
  for (; index >= 0; ++num_items) {
    OpenItem<Traits>(args, index, item, positions);
    if (item->plan.request < 0) return;
    uint32_t fetch = 0;
    if (threadIdx.x == 0) {
      if (num_items == 0) ReportStart(args, counts);
      fetch = AskForItem(args);
    }
    __syncthreads();
    process();
    __syncthreads();
    if (threadIdx.x == 0) item->queue.next_item = SettleItem(args, counts, fetch);
    __syncthreads();
    index = item->queue.next_item;
  }
  if (threadIdx.x == 0) {
    item->queue.counts = counts;
    item->queue.ticket = kNoTicket;
  }
  __syncthreads();
  CombineAll<Traits>(args, item, num_items, buffer);
}

}  // namespace nwor
