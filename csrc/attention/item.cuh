#pragma once

#include "attention/fold.cuh"
#include "attention/status.cuh"

// A work item from the queue to shared memory, and its arrival when it is done: what all verify
// kernels have in common. A Traits type here has Row, kFloat8, kHeadDim, kRowTile and kThreads.
//
// Waiting cannot deadlock: a CTA waits only once every item has been taken by a running CTA, and
// the CTAs it waits for do not wait before they have arrived.

namespace nwor {

template <class Traits>
__device__ void MapTokens(const VerifyArgs& args, SharedItem* item) {
  const VerifyParams& p = args.params;
  const PlanItem& plan = item->plan;
  TokenMap& map = item->tokens;
  map.ids = nullptr;
  map.unit_tokens = map.units_per_page = Divisor{};
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
  if (plan.source == TokenSource::kBlocks) {
    map.ids = p.view.blocks + (int64_t{plan.request} * p.num_kv_heads + head) * p.view.max_blocks;
    map.unit_tokens = args.block_tokens;
    map.units_per_page = args.blocks_per_page;
  } else {
    map.ids = p.block_table + plan.request * p.table_stride;
    map.unit_tokens = args.page_tokens;
  }
}

__device__ inline float HeadScale(const float* scales, int count, int head) {
  return scales == nullptr ? 1.0f : scales[count > 1 ? head : 0];
}

// Brings item `index` and what follows from it to shared memory, the rows' positions too if a
// window asks for them. Called by the whole CTA, which must meet before it reads more than
// item->plan.
template <class Traits>
__device__ void OpenItem(const VerifyArgs& args, int index, SharedItem* item, int32_t* positions) {
  const VerifyParams& p = args.params;
  if (threadIdx.x < sizeof(PlanItem) / sizeof(int4)) {
    reinterpret_cast<int4*>(&item->plan)[threadIdx.x] =
        reinterpret_cast<const int4*>(args.items + index)[threadIdx.x];
  }
  __syncthreads();
  const PlanItem& plan = item->plan;
  if (plan.request < 0) return;
  if (threadIdx.x == 0) {
    MapTokens<Traits>(args, item);
    const float scale = p.scale * 1.4426950408889634f;
    item->tail_scale = scale;
    item->prefix_scale = scale;
    item->value_scale = 1.0f;
    item->cap_outer = p.softcap * 1.4426950408889634f;
    item->cap_inner = p.softcap == 0.0f ? 0.0f : 2.0f / p.softcap;
    if (Traits::kFloat8 && plan.source != TokenSource::kCompact) {
      const KvScales& scales = p.cache.scales;
      item->prefix_scale = scale * HeadScale(scales.key, scales.key_count, plan.kv_head);
      item->value_scale = HeadScale(scales.value, scales.value_count, plan.kv_head);
    }
  }
  if (p.window > 0 && threadIdx.x < Traits::kRowTile) {
    const int group = p.num_heads / p.num_kv_heads;
    const int row =
        min((plan.row_begin + static_cast<int>(threadIdx.x)) / group, plan.request_rows - 1);
    positions[threadIdx.x] = plan.prefix_tokens + RowDepth(p, plan, row);
  }
}

// Byte offsets from the map's keys and values of a block of 16 prefix tokens that starts at
// `token`. A block past `end`, or in a page that does not exist, is given some place that can be
// read.
struct BlockOffsets {
  int64_t key, value;
};
__device__ inline BlockOffsets LocateBlock(const VerifyArgs& args, const SharedItem& item,
                                           int token, int end) {
  const TokenMap& map = item.tokens;
  int64_t page = 0;
  int64_t offset = token;
  if (map.ids != nullptr) {
    const int unit_tokens = map.unit_tokens.value;
    const int unit = map.unit_tokens.Quotient(token);
    const int id = token < end ? map.ids[unit] : 0;
    const int in_page = map.units_per_page.Quotient(id);
    page = in_page;
    offset = (id - in_page * static_cast<int>(map.units_per_page.value)) * unit_tokens + token -
             unit * unit_tokens;
    if (id < 0 || page >= map.num_pages) {
      ReportError(args.params.status, VerifyStatus::kBadPage, item.plan.request, id);
      page = offset = 0;
    }
  }
  return {page * map.key_page + offset * map.key_token,
          page * map.value_page + offset * map.value_token};
}

// In-flight rows that the rows of an item may see in a leaf: only the last leaf has them. Without a
// mask no row of the tile sees past its own last query row.
__device__ inline int TailRows(const VerifyParams& p, const PlanItem& item, int leaf) {
  if (leaf + 1 != item.num_leaves) return 0;
  if (p.tree_mask != nullptr) return item.request_rows;
  return (item.row_begin + item.num_rows - 1) / (p.num_heads / p.num_kv_heads) + 1;
}

// Reports a partial result; the last of its pair sees to the combine. A CTA that has nothing else
// to do stays to help. Called by the whole CTA, with `idle` in thread 0.
template <class Traits>
__device__ void ArriveAtPair(const VerifyArgs& args, SharedItem* shared, bool idle) {
  const PlanItem& item = shared->plan;
  uint32_t* call = args.calls + item.pair;
  uint32_t leaving = 0;
  __syncthreads();  // all of this CTA's stores are made
  if (threadIdx.x == 0) {
    __threadfence();
    const uint32_t before = atomicAdd(args.arrivals + item.pair, idle ? 0x10001u : 1u);
    const uint32_t helpers = before >> 16;
    int share = helpers;
    int shares = 0;
    if ((before & 0xffffu) + 1 == static_cast<uint32_t>(item.num_parts)) {
      args.arrivals[item.pair] = 0;
      shares = helpers + 1;
      __threadfence();
      if (helpers > 0) atomicExch(call, helpers << 16 | helpers);
    } else if (idle) {
      uint32_t called;
      while ((called = ptx::LoadAcquire(call)) == 0) __nanosleep(20);
      shares = (called >> 16) + 1;
      leaving = atomicSub(call, 1);
    }
    shared->share = share;
    shared->shares = shares;
    __threadfence();
  }
  __syncthreads();
  if (shared->shares > 0) {
    CombineParts<Traits>(args, item, shared->share, shared->shares);
  }
  if ((leaving & 0xffffu) == 1) *call = 0;  // the last helper: all have read it
}

// Takes items from the queue until it is empty. process() works on the one in `item`, up to its
// output or partial result. Called by the whole CTA.
template <class Traits, typename Process>
__device__ void ServeQueue(const VerifyArgs& args, SharedItem* item, int32_t* positions,
                           Process process) {
  WorkCounters& counters = *args.counters;
  int num_items = 0;
  uint32_t base = 0;
  if (threadIdx.x == 0) {
    num_items = args.plan->num_items;
    base = counters.fetch_base;
  }
  int index = blockIdx.x;
  while (index >= 0) {
    OpenItem<Traits>(args, index, item, positions);
    if (item->plan.request < 0) return;
    int next = 0;
    if (threadIdx.x == 0) {
      const int fetch = static_cast<int>(atomicAdd(&counters.fetches, 1) - base);
      // Every item asks once: the last to ask moves the base on for the next launch.
      if (fetch == num_items - 1) counters.fetch_base = base + num_items;
      next = fetch + static_cast<int>(gridDim.x);
    }
    __syncthreads();
    process();
    if (item->plan.num_parts > 1) {
      const bool idle =
          threadIdx.x == 0 && next >= num_items &&
          ptx::LoadAcquire(&counters.fetches) - base == static_cast<uint32_t>(num_items);
      ArriveAtPair<Traits>(args, item, idle);
    }
    if (threadIdx.x == 0) item->next_item = next < num_items ? next : -1;
    __syncthreads();
    index = item->next_item;
  }
}

}  // namespace nwor
