#pragma once

#include "attention/cuda/kernel_args.cuh"
#include "attention/cuda/row_depth.cuh"
#include "attention/cuda/status.cuh"

// The work tile of a CTA: fetching it from the queue, and finding its tokens through the page
// table. Both kernels use it: sm80/scheduler.cuh and sm90/work_producer.cuh fetch and prepare work
// tiles, their loaders look tokens up. A Traits type here has kFloat8.

namespace nwor {

// Finds the work tile's row of the page table. Called by one thread.
__device__ inline void SetPageTable(const VerifyArgs& args, SharedWorkTile* work_tile) {
  const VerifyParams& p = args.params;
  const WorkTile& plan = work_tile->plan;
  PagedKv& kv = work_tile->kv;
  kv.page_table = nullptr;
  kv.unit_tokens = kv.units_per_page = FastDivisor{};
  if (plan.source == TokenSource::kBlocks) {
    const int64_t list = int64_t{plan.request} * p.num_kv_heads + plan.kv_head;
    kv.page_table = p.view.blocks + list * p.view.max_blocks;
    kv.unit_tokens = args.block_tokens;
    kv.units_per_page = args.blocks_per_page;
  } else if (plan.source == TokenSource::kPages) {
    kv.page_table = p.block_table + plan.request * p.table_stride;
    kv.unit_tokens = args.page_tokens;
  }
}

// Finds K and V of the work tile's KV head.
template <class Traits>
__device__ void SetKvPointers(const VerifyArgs& args, SharedWorkTile* work_tile) {
  const VerifyParams& p = args.params;
  const WorkTile& plan = work_tile->plan;
  PagedKv& kv = work_tile->kv;
  kv.num_pages = p.cache.geometry.num_pages;
  const int64_t head = plan.kv_head;
  if (plan.source == TokenSource::kCompact) {
    const int64_t base = plan.request * p.compact.batch_stride + head * p.compact.head_stride;
    kv.keys = static_cast<const char*>(p.compact.keys) + base * 2;
    kv.values = static_cast<const char*>(p.compact.values) + base * 2;
    kv.key_page = kv.value_page = 0;
    kv.key_token = kv.value_token = p.compact.token_stride * 2;
    return;
  }
  constexpr int kBytes = Traits::kFloat8 ? 1 : 2;
  const CacheGeometry& g = p.cache.geometry;
  kv.keys = static_cast<const char*>(p.cache.key) + head * g.key.head * kBytes;
  kv.values = static_cast<const char*>(p.cache.value) + head * g.value.head * kBytes;
  kv.key_page = g.key.page * kBytes;
  kv.value_page = g.value.page * kBytes;
  kv.key_token = g.key.token * kBytes;
  kv.value_token = g.value.token * kBytes;
}

__device__ inline float HeadScale(const float* scales, int count, int head) {
  return scales == nullptr ? 1.0f : scales[count > 1 ? head : 0];
}

// The smallest normal float. A score times it is as good as 0.
inline constexpr float kMinNormal = 1.17549435e-38f;

// Completes a work tile whose `plan` and page table are set. Called by one thread.
template <class Traits>
__device__ void PrepareWorkTile(const VerifyArgs& args, SharedWorkTile* work_tile) {
  const VerifyParams& p = args.params;
  const WorkTile& plan = work_tile->plan;
  SetKvPointers<Traits>(args, work_tile);
  const float scale = p.scale * 1.4426950408889634f;
  work_tile->in_flight_scale = scale;
  work_tile->prefix_scale = scale;
  work_tile->value_scale = 1.0f;
  work_tile->cap_outer = p.softcap * 1.4426950408889634f;
  work_tile->cap_inner = p.softcap == 0.0f ? 0.0f : 2.0f / p.softcap;
  if (Traits::kFloat8 && plan.source != TokenSource::kCompact) {
    const KvScales& scales = p.cache.scales;
    const float prefix_scale = scale * HeadScale(scales.key, scales.key_count, plan.kv_head);
    // A masked score times 0 would be NaN.
    work_tile->prefix_scale = prefix_scale == 0.0f ? kMinNormal : prefix_scale;
    work_tile->value_scale = HeadScale(scales.value, scales.value_count, plan.kv_head);
  }
}

// The position of a row of the work tile among the tokens.
__device__ inline int RowPosition(const VerifyArgs& args, const WorkTile& plan, int row) {
  const int query_row = min(args.group.Quotient(plan.row_begin + row), plan.request_rows - 1);
  return plan.prefix_tokens + RowDepth(args.params, plan, query_row);
}

// Where a block of 16 prefix tokens lies: a page and the first token in it, or the request and a
// token of its compact view. A block past the end, or in a page that does not exist, gets some
// position that can be read.
struct PagePosition {
  int page, token;
};
// The id of the page or view block that holds `token`; 0 past `end`.
__device__ inline int ReadPageId(const SharedWorkTile& work_tile, int token, int end) {
  const PagedKv& kv = work_tile.kv;
  return kv.page_table != nullptr && token < end ? kv.page_table[kv.unit_tokens.Quotient(token)]
                                                 : 0;
}
__device__ inline PagePosition LookUpPage(const VerifyArgs& args, const SharedWorkTile& work_tile,
                                          int token, int id) {
  const PagedKv& kv = work_tile.kv;
  if (kv.page_table == nullptr) return {work_tile.plan.request, token};
  const int unit_tokens = kv.unit_tokens.value;
  const int page = kv.units_per_page.Quotient(id);
  if (id < 0 || page >= kv.num_pages) {
    ReportError(args.params.status, VerifyStatus::kBadPage, work_tile.plan.request, id);
    return {0, 0};
  }
  const int part = id - page * static_cast<int>(kv.units_per_page.value);
  return {page, part * unit_tokens + token - kv.unit_tokens.Quotient(token) * unit_tokens};
}

// The same as byte offsets from kv.keys and kv.values.
struct KvOffsets {
  int64_t key, value;
};
__device__ inline KvOffsets LookUpKv(const VerifyArgs& args, const SharedWorkTile& work_tile,
                                     int token, int id) {
  const PagedKv& kv = work_tile.kv;
  const PagePosition at = LookUpPage(args, work_tile, token, id);
  const int64_t page = kv.page_table == nullptr ? 0 : at.page;
  return {page * kv.key_page + at.token * kv.key_token,
          page * kv.value_page + at.token * kv.value_token};
}

// How many in-flight rows a split has: only the last split has any. Without a mask no row of the
// tile sees past its own last query row.
__device__ inline int InFlightRows(const VerifyParams& p, const WorkTile& work_tile, int split) {
  if (split + 1 != work_tile.num_splits) return 0;
  if (p.tree_mask != nullptr) return work_tile.request_rows;
  return (work_tile.row_begin + work_tile.num_rows - 1) / (p.num_heads / p.num_kv_heads) + 1;
}

// Signals that this CTA runs and has its first work tile. Called by one thread.
__device__ inline void SignalStart(const VerifyArgs& args, const LaunchCounts& counts) {
  if (counts.num_split_outputs > 0) {
    atomicAdd(&args.counters->per_launch[counts.launch % 2].started, 1);
  }
}

// Fetches the CTA's next work tile. NextWorkTile turns the fetch into its index, or -1. Every work
// tile fetches once; the last fetch prepares the counters of the next launch. Called by one thread.
__device__ inline uint32_t FetchWorkTile(const VerifyArgs& args) {
  return atomicAdd(&args.counters->fetches, 1);
}
__device__ inline int NextWorkTile(const VerifyArgs& args, const LaunchCounts& counts,
                                   uint32_t fetch) {
  SchedulerCounters& counters = *args.counters;
  const int index = static_cast<int>(fetch - counts.fetch_base);
  if (index == counts.num_work_tiles - 1) {
    counters.per_launch[(counts.launch + 1) % 2] = {};
    counters.launch = counts.launch + 1;
    counters.fetch_base = counts.fetch_base + counts.num_work_tiles;
  }
  const int next = index + static_cast<int>(gridDim.x);
  return next < counts.num_work_tiles ? next : -1;
}

}  // namespace nwor
