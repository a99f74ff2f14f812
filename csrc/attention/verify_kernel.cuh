#pragma once

#include "attention/fold.cuh"
#include "attention/token_stream.cuh"
#include "attention/warp_attention.cuh"

// The verify-attention kernel: persistent CTAs take the planned items from a queue.
//
//   item:  queries to shared memory; per leaf: streams (token_stream.cuh) feed warps
//          (warp_attention.cuh), whose results are merged (fold.cuh); out goes the output, or a
//          partial result and an arrival.
//   pair:  the CTA that arrives last combines the partial results itself while the queue still has
//          items; when it is empty it publishes the pair instead, and all idle CTAs share the
//          combine.
//
// Waiting cannot deadlock: CTAs wait only when every item has been taken, that is, when all work
// they wait for is in the hands of running CTAs, none of which waits before its items are done.

namespace nwor {

inline constexpr int kSliceRows = 4;  // rows of a shared combine that one CTA takes

template <class Traits>
__device__ void MapTokens(const VerifyParams& p, SharedItem* item) {
  const PlanItem& plan = item->plan;
  TokenMap& map = item->tokens;
  map.ids = nullptr;
  map.unit_tokens = 1;
  map.units_per_page = 1;
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
    map.unit_tokens = p.view.block_size;
    map.units_per_page = g.page_size / p.view.block_size;
  } else {
    map.ids = p.block_table + plan.request * p.table_stride;
    map.unit_tokens = g.page_size;
  }
}

__device__ inline float HeadScale(const float* scales, int count, int head) {
  return scales == nullptr ? 1.0f : scales[count > 1 ? head : 0];
}

// Brings item `index` and what follows from it to shared memory. Called by the whole CTA.
template <class Traits>
__device__ void OpenItem(const VerifyArgs& args, const SharedMemory<Traits>& smem, int index) {
  const VerifyParams& p = args.params;
  SharedItem& item = *smem.item;
  if (threadIdx.x < sizeof(PlanItem) / sizeof(int4)) {
    reinterpret_cast<int4*>(&item.plan)[threadIdx.x] =
        reinterpret_cast<const int4*>(args.items + index)[threadIdx.x];
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    MapTokens<Traits>(p, &item);
    const float scale = p.scale * 1.4426950408889634f;
    item.tail_scale = scale;
    item.prefix_scale = scale;
    item.value_scale = 1.0f;
    if (Traits::kFloat8 && item.plan.source != TokenSource::kCompact) {
      const KvScales& scales = p.cache.scales;
      item.prefix_scale = scale * HeadScale(scales.key, scales.key_count, item.plan.kv_head);
      item.value_scale = HeadScale(scales.value, scales.value_count, item.plan.kv_head);
    }
  }

  // Queries: packed rows, zeros past the last. Beside float8 pages as halves, each 16 channels in
  // the order WarpAttention::LoadKeys asks for: pairs 0,2,4,6 then 1,3,5,7.
  constexpr int kSpans = Traits::kHeadDim / 16;
  for (int i = threadIdx.x; i < Traits::kRowTile * kSpans; i += Traits::kThreads) {
    const int row = i / kSpans;
    const int span = i % kSpans;
    uint4 low = {}, high = {};
    if (row < item.plan.num_rows) {
      const OutputRow at = LocateRow(p, item.plan, row);
      const auto* source = reinterpret_cast<const uint4*>(
          static_cast<const typename Traits::Row*>(p.query) + at.row * p.query_strides.row +
          at.head * p.query_strides.head + span * 16);
      low = source[0];
      high = source[1];
      if constexpr (Traits::kFloat8) {
        using Row = typename Traits::Row;
        const uint4 a = low, b = high;
        low = {ptx::ToHalf2<Row>(a.x), ptx::ToHalf2<Row>(a.z), ptx::ToHalf2<Row>(b.x),
               ptx::ToHalf2<Row>(b.z)};
        high = {ptx::ToHalf2<Row>(a.y), ptx::ToHalf2<Row>(a.w), ptx::ToHalf2<Row>(b.y),
                ptx::ToHalf2<Row>(b.w)};
      }
    }
    *reinterpret_cast<uint4*>(smem.query + ChunkOffset<Traits::kRowBytes>(row, 2 * span)) = low;
    *reinterpret_cast<uint4*>(smem.query + ChunkOffset<Traits::kRowBytes>(row, 2 * span + 1)) =
        high;
  }
  if (p.window > 0 && threadIdx.x < Traits::kRowTile) {
    const int group = p.num_heads / p.num_kv_heads;
    const int row = min((item.plan.row_begin + static_cast<int>(threadIdx.x)) / group,
                        item.plan.request_rows - 1);
    smem.rows->position[threadIdx.x] =
        item.plan.prefix_tokens + RowDepth(p, item.plan.query_start, row);
  }
  __syncthreads();
}

// One leaf up to the streams' results in the merge buffer. Called by the whole CTA.
template <class Traits>
__device__ void RunLeaf(const VerifyArgs& args, const SharedMemory<Traits>& smem, int leaf) {
  const VerifyParams& p = args.params;
  const SharedItem& item = *smem.item;
  const int warp = threadIdx.x / 32;
  const int stream_idx = warp / Traits::kRowSplits;
  const int first_row = warp % Traits::kRowSplits * Traits::kWarpRows;
  const auto meet = [&] {
    if constexpr (Traits::kRowSplits == 1) {
      __syncwarp();
    } else {
      ptx::NamedBarrier(1 + stream_idx, 32 * Traits::kRowSplits);
    }
  };

  const int begin = item.plan.token_begin + leaf * item.plan.leaf_tokens;
  const int end = min(begin + item.plan.leaf_tokens, item.plan.prefix_tokens);
  int tail_rows = 0;
  if (leaf + 1 == item.plan.num_leaves) {
    // Without a mask no row of this tile sees past its own last query row.
    const int last =
        (item.plan.row_begin + item.plan.num_rows - 1) / (p.num_heads / p.num_kv_heads);
    tail_rows = p.tree_mask != nullptr ? item.plan.request_rows : last + 1;
  }
  TokenStream<Traits> stream(args, item, ptx::SharedAddress(smem.stages), stream_idx, begin,
                             max(end, begin), tail_rows);
  WarpAttention<Traits> attention(args, item, ptx::SharedAddress(smem.query), smem.rows->position,
                                  first_row);

  const int stages = args.stages;
  for (int step = 0; step < stages - 1; ++step) stream.Load(step, step);
  int fill = stages - 1;
  int drain = 0;
  for (int step = 0; step < stream.num_steps(); ++step) {
    meet();  // the stage to fill is no longer read
    stream.Load(step + stages - 1, fill);
    fill = fill + 1 == stages ? 0 : fill + 1;
    ptx::WaitCopies(stages - 1);
    meet();  // this step's copies are visible to all warps of the stream
    const uint32_t stage = stream.StageAddress(drain);
    drain = drain + 1 == stages ? 0 : drain + 1;
    const bool in_flight = step >= stream.num_prefix();
    if (Traits::kFloat8 && !in_flight && item.plan.source != TokenSource::kCompact) {
      attention.template Step<Traits::kFloat8>(stage, stream.PrefixToken(step), end, false);
    } else {
      if (Traits::kFloat8 && step == stream.num_prefix()) attention.ScaleOutput(item.value_scale);
      const int first = in_flight ? stream.TailRow(step) : stream.PrefixToken(step);
      attention.template Step<false>(stage, first, in_flight ? tail_rows : end, in_flight);
    }
  }
  if (Traits::kFloat8 && stream.num_steps() == stream.num_prefix()) {
    attention.ScaleOutput(item.value_scale);
  }
  __syncthreads();  // all stages are drained: the merge buffer takes their place
  attention.Store(smem.rows->max[stream_idx], smem.rows->sum[stream_idx],
                  smem.merge + stream_idx * Traits::kRowTile * Traits::kMergeStride);
  __syncthreads();
}

// Reports a partial result; the last of its pair sees to the combine. Called by the whole CTA.
template <class Traits>
__device__ void ArriveAtPair(const VerifyArgs& args, const SharedMemory<Traits>& smem, int index) {
  const PlanItem& item = smem.item->plan;
  WorkCounters& counters = *args.counters;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    bool combine = false;
    if (atomicAdd(args.arrivals + item.pair, 1) == item.num_parts - 1) {
      args.arrivals[item.pair] = 0;
      const int taken = ptx::LoadAcquire(&counters.next_item) + static_cast<int>(gridDim.x);
      combine = taken < args.plan->num_items;
      if (!combine) {
        __threadfence();
        atomicExch(args.ready + atomicAdd(&counters.published, 1), index + 1);
      }
      __threadfence();
      atomicAdd(&counters.settled_pairs, 1);
    }
    smem.item->decision = combine;
  }
  __syncthreads();
  if (smem.item->decision) {
    __threadfence();
    CombineParts<Traits>(args, item, 0, item.num_rows);
  }
}

// Waits for entry `at` of the ready list: its item, or -1 when the list will not get that long.
__device__ inline int AwaitReady(const VerifyArgs& args, int at) {
  const int num_pairs = args.plan->num_split_pairs;
  if (at >= num_pairs) return -1;
  for (;;) {
    const int entry = ptx::LoadAcquire(args.ready + at);
    if (entry != 0) return entry - 1;
    if (ptx::LoadAcquire(&args.counters->settled_pairs) == num_pairs &&
        ptx::LoadAcquire(&args.counters->published) <= at) {
      return -1;
    }
    __nanosleep(20);
  }
}

// Combines published pairs, a few rows at a time, until all pairs are settled.
template <class Traits>
__device__ void ShareCombines(const VerifyArgs& args, const SharedMemory<Traits>& smem) {
  constexpr int kSlices = Traits::kRowTile / kSliceRows;
  for (;;) {
    __syncthreads();
    if (threadIdx.x == 0) {
      const int slice = atomicAdd(&args.counters->next_slice, 1);
      const int index = AwaitReady(args, slice / kSlices);
      if (index >= 0) smem.item->plan = args.items[index];
      smem.item->decision = index < 0 ? -1 : slice % kSlices;
      __threadfence();
    }
    __syncthreads();
    const int slice = smem.item->decision;
    if (slice < 0) return;
    const PlanItem& item = smem.item->plan;
    const int row = slice * kSliceRows;
    CombineParts<Traits>(args, item, row, min(row + kSliceRows, item.num_rows));
  }
}

// The last CTA leaves the counters as it found them.
__device__ inline void LeaveQueue(const VerifyArgs& args, int32_t* is_last) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    *is_last = atomicAdd(&args.counters->finished_ctas, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (!*is_last) return;
  __threadfence();
  for (int i = threadIdx.x; i < args.counters->published; i += blockDim.x) args.ready[i] = 0;
  __syncthreads();
  if (threadIdx.x == 0) *args.counters = WorkCounters{};
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    VerifyKernel(const __grid_constant__ VerifyArgs args) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  const SharedMemory<Traits> smem(shared_bytes);
  const int num_items = args.plan->num_items;

  int index = blockIdx.x;
  while (index < num_items) {
    int next = 0;
    if (threadIdx.x == 0) {
      next = atomicAdd(&args.counters->next_item, 1) + static_cast<int>(gridDim.x);
    }
    OpenItem<Traits>(args, smem, index);
    for (int leaf = smem.item->plan.leaf_begin; leaf < smem.item->plan.leaf_end; ++leaf) {
      RunLeaf<Traits>(args, smem, leaf);
      FinishLeaf<Traits>(args, smem, leaf);
    }
    if (smem.item->plan.num_parts > 1) ArriveAtPair<Traits>(args, smem, index);
    if (threadIdx.x == 0) smem.item->next_item = next;
    __syncthreads();
    index = smem.item->next_item;
  }
  if (args.plan->num_split_pairs > 0) ShareCombines<Traits>(args, smem);
  LeaveQueue(args, &smem.item->decision);
}

}  // namespace nwor
