#pragma once

#include "attention/fold.cuh"
#include "attention/token_stream.cuh"
#include "attention/warp_attention.cuh"

// The verify-attention kernel: persistent CTAs take the planned items from a queue.
//
//   item:  queries to shared memory; per leaf: streams (token_stream.cuh) feed warps
//          (warp_attention.cuh), whose results are merged (fold.cuh); out goes the output, or a
//          partial result and an arrival.
//   pair:  the CTA that arrives last combines the partial results, together with those that arrived
//          before it and found no further item to work on.
//
// Waiting cannot deadlock: a CTA waits only once every item has been taken by a running CTA, and
// the CTAs it waits for do not wait before they have arrived.

namespace nwor {

template <class Traits>
__device__ void MapTokens(const VerifyParams& p, SharedItem* item) {
  const PlanItem& plan = item->plan;
  TokenMap& map = item->tokens;
  map.ids = nullptr;
  map.unit_tokens = map.units_per_page = Divisor::Of(1);
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
    map.unit_tokens = Divisor::Of(p.view.block_size);
    map.units_per_page = Divisor::Of(g.page_size / p.view.block_size);
  } else {
    map.ids = p.block_table + plan.request * p.table_stride;
    map.unit_tokens = Divisor::Of(g.page_size);
  }
}

__device__ inline float HeadScale(const float* scales, int count, int head) {
  return scales == nullptr ? 1.0f : scales[count > 1 ? head : 0];
}

// Queries: packed rows, zeros past the last. Beside float8 pages as halves, each 16 channels in the
// order WarpAttention::LoadKeys asks for: pairs 0,2,4,6 then 1,3,5,7.
template <class Traits>
__device__ void LoadQueries(const VerifyParams& p, const PlanItem& item, uint8_t* query) {
  using Row = typename Traits::Row;
  using Layout = RowSwizzle<Traits::kRowBytes>;
  constexpr int kSpans = Traits::kHeadDim / 16;
  const uint64_t policy = ptx::EvictFirstPolicy();
  for (int i = threadIdx.x; i < Traits::kRowTile * kSpans; i += Traits::kThreads) {
    const int row = i / kSpans;
    const int span = i % kSpans;
    const bool valid = row < item.num_rows;
    const OutputRow at = LocateRow(p, item, valid ? row : 0);
    const auto* source = reinterpret_cast<const uint4*>(static_cast<const Row*>(p.query) +
                                                        at.row * p.query_strides.row +
                                                        at.head * p.query_strides.head + span * 16);
    uint8_t* low = query + Layout::Offset(row, 2 * span);
    uint8_t* high = query + Layout::Offset(row, 2 * span + 1);
    if constexpr (Traits::kFloat8) {
      const uint4 a = valid ? source[0] : uint4{};
      const uint4 b = valid ? source[1] : uint4{};
      *reinterpret_cast<uint4*>(low) = {ptx::ToHalf2<Row>(a.x), ptx::ToHalf2<Row>(a.z),
                                        ptx::ToHalf2<Row>(b.x), ptx::ToHalf2<Row>(b.z)};
      *reinterpret_cast<uint4*>(high) = {ptx::ToHalf2<Row>(a.y), ptx::ToHalf2<Row>(a.w),
                                         ptx::ToHalf2<Row>(b.y), ptx::ToHalf2<Row>(b.w)};
    } else {
      ptx::CopyAsync(ptx::SharedAddress(low), source, valid, policy);
      ptx::CopyAsync(ptx::SharedAddress(high), source + 1, valid, policy);
    }
  }
}

// Brings item `index` and what follows from it to shared memory. Called by the whole CTA; the
// copies of the queries are left under way, in a group of their own.
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
    item.cap_outer = p.softcap * 1.4426950408889634f;
    item.cap_inner = p.softcap == 0.0f ? 0.0f : 2.0f / p.softcap;
    if (Traits::kFloat8 && item.plan.source != TokenSource::kCompact) {
      const KvScales& scales = p.cache.scales;
      item.prefix_scale = scale * HeadScale(scales.key, scales.key_count, item.plan.kv_head);
      item.value_scale = HeadScale(scales.value, scales.value_count, item.plan.kv_head);
    }
  }
  LoadQueries<Traits>(p, item.plan, smem.query);
  ptx::CommitCopies();
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

  const int stages = args.stages;
#pragma unroll 1
  for (int step = 0; step < stages - 1; ++step) stream.Load(step, step);
  if (leaf == item.plan.leaf_begin) {
    ptx::WaitCopies(stages - 1);  // the queries', made before the stages'
    __syncthreads();
  }
  WarpAttention<Traits> attention(args, item, ptx::SharedAddress(smem.query), smem.rows->position,
                                  first_row);
  int fill = stages - 1;
  int drain = 0;
  int step = 0;
  const auto load_then_wait = [&](auto load) {
    meet();  // the stage to fill is no longer read
    load(step + stages - 1, fill);
    fill = fill + 1 == stages ? 0 : fill + 1;
    ptx::WaitCopies(stages - 1);
    meet();  // this step's copies are visible to all warps of the stream
    const uint32_t stage = stream.StageAddress(drain);
    drain = drain + 1 == stages ? 0 : drain + 1;
    return stage;
  };
  const int plain_begin = stream.plain_begin();
  const int plain_end = stream.plain_end() - (stages - 1);
#pragma unroll 1
  while (step < stream.num_steps()) {
    // Nearly all steps are plain; a loop of their own keeps the rare cases out of their registers.
#pragma unroll 1
    while (step >= plain_begin && step < plain_end && stream.IsAtHand(step + stages - 1)) {
      const uint32_t stage = load_then_wait([&](int load, int at) { stream.LoadPlain(load, at); });
      attention.template ClearStep<Traits::kFloat8>(stage);
      ++step;
    }
    const uint32_t stage = load_then_wait([&](int load, int at) { stream.Load(load, at); });
    const bool in_flight = step >= stream.num_prefix();
    if (Traits::kFloat8 && !in_flight && item.plan.source != TokenSource::kCompact) {
      attention.template EdgeStep<Traits::kFloat8>(stage, stream.PrefixToken(step), end);
    } else {
      if (Traits::kFloat8 && step == stream.num_prefix()) attention.ScaleOutput(item.value_scale);
      const int first = in_flight ? stream.TailRow(step) : stream.PrefixToken(step);
      attention.RowStep(stage, first, in_flight ? tail_rows : end, in_flight);
    }
    ++step;
  }
  if (Traits::kFloat8 && stream.num_steps() == stream.num_prefix()) {
    attention.ScaleOutput(item.value_scale);
  }
  __syncthreads();  // all stages are drained: the merge buffer takes their place
  attention.Store(smem.rows->max[stream_idx], smem.rows->sum[stream_idx],
                  smem.merge + stream_idx * Traits::kRowTile * Traits::kMergeStride);
  __syncthreads();
}

// Reports a partial result; the last of its pair sees to the combine. A CTA that has nothing else
// to do stays to help. Called by the whole CTA, with `idle` in thread 0.
template <class Traits>
__device__ void ArriveAtPair(const VerifyArgs& args, const SharedMemory<Traits>& smem, bool idle) {
  const PlanItem& item = smem.item->plan;
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
    smem.item->share = share;
    smem.item->shares = shares;
    __threadfence();
  }
  __syncthreads();
  if (smem.item->shares > 0) {
    CombineParts<Traits>(args, item, smem.item->share, smem.item->shares);
  }
  if ((leaving & 0xffffu) == 1) *call = 0;  // the last helper: all have read it
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    VerifyKernel(const __grid_constant__ VerifyArgs args) {
  extern __shared__ __align__(128) uint8_t shared_bytes[];
  const SharedMemory<Traits> smem(shared_bytes);
  const int num_items = args.plan->num_items;
  WorkCounters& counters = *args.counters;
  const uint32_t base = threadIdx.x == 0 ? counters.fetch_base : 0;

  int index = blockIdx.x;
  while (index < num_items) {
    int next = 0;
    if (threadIdx.x == 0) {
      const int fetch = static_cast<int>(atomicAdd(&counters.fetches, 1) - base);
      // Every item asks once: the last to ask moves the base on for the next launch.
      if (fetch == num_items - 1) counters.fetch_base = base + num_items;
      next = fetch + static_cast<int>(gridDim.x);
    }
    OpenItem<Traits>(args, smem, index);
    for (int leaf = smem.item->plan.leaf_begin; leaf < smem.item->plan.leaf_end; ++leaf) {
      RunLeaf<Traits>(args, smem, leaf);
      FinishLeaf<Traits>(args, smem, leaf);
    }
    if (smem.item->plan.num_parts > 1) {
      const bool idle =
          threadIdx.x == 0 && next >= num_items &&
          ptx::LoadAcquire(&counters.fetches) - base == static_cast<uint32_t>(num_items);
      ArriveAtPair<Traits>(args, smem, idle);
    }
    if (threadIdx.x == 0) smem.item->next_item = next;
    __syncthreads();
    index = smem.item->next_item;
  }
}

}  // namespace nwor
