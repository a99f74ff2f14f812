#pragma once

#include "attention/cuda/mbarrier.cuh"
#include "attention/cuda/sm80/epilogue.cuh"
#include "attention/cuda/sm80/kv_loader.cuh"
#include "attention/cuda/sm80/scheduler.cuh"
#include "attention/cuda/sm80/warp_attention.cuh"

// The verify-attention kernel for sm_80 and up (mma.sync, cp.async). On sm_90a it only serves
// float8 caches with heads of other than 64 or 128 channels; sm90/kernel.cuh serves the others.
// ../launch.cuh launches it, one CTA or two per SM.
//
//   scheduler       persistent CTAs take work tiles from the queue (scheduler.cuh)
//   loader          per split, every KV warp copies its steps into its own stages (kv_loader.cuh);
//                   there is no separate producer warp
//   mask, softmax   the same warp computes QK, mask, softmax and PV (warp_attention.cuh)
//   merge           at the end of a split the KV warps' states are merged, then the split with the
//                   splits before it (epilogue.cuh, ../merge.cuh)
//   combine         partial results of split output tiles, after the last work tile
//   (../combine.cuh)
//
// Data flow: Q and K/V go from global to shared memory to fragments in registers; the KV warps'
// outputs go through shared memory to `out`, or to a slot of the workspace.

namespace nwor::sm80 {

// Loads the queries: packed rows, zeros past the last. Beside float8 pages they are stored as
// halves, each 16 channels in the order of KeyFragments: pairs 0,2,4,6 then 1,3,5,7.
template <class Traits>
__device__ void LoadQueries(const VerifyArgs& args, const WorkTile& work_tile, uint8_t* query) {
  const VerifyParams& p = args.params;
  using Element = typename Traits::Element;
  using Layout = RowSwizzle<Traits::kRowBytes>;
  constexpr int kSpans = Traits::kHeadDim / 16;
  const uint64_t policy = ptx::EvictFirstPolicy();
  for (int i = threadIdx.x; i < Traits::kRowTile * kSpans; i += Traits::kThreads) {
    const int row = i / kSpans;
    const int span = i % kSpans;
    const bool valid = row < work_tile.num_rows;
    const OutputRow at = LocateRow(args, work_tile, valid ? row : 0);
    const auto* source = reinterpret_cast<const uint4*>(static_cast<const Element*>(p.query) +
                                                        at.row * p.query_strides.row +
                                                        at.head * p.query_strides.head + span * 16);
    uint8_t* low = query + Layout::Offset(row, 2 * span);
    uint8_t* high = query + Layout::Offset(row, 2 * span + 1);
    if constexpr (Traits::kFloat8) {
      const uint4 a = valid ? source[0] : uint4{};
      const uint4 b = valid ? source[1] : uint4{};
      *reinterpret_cast<uint4*>(low) = {ptx::ToHalf2<Element>(a.x), ptx::ToHalf2<Element>(a.z),
                                        ptx::ToHalf2<Element>(b.x), ptx::ToHalf2<Element>(b.z)};
      *reinterpret_cast<uint4*>(high) = {ptx::ToHalf2<Element>(a.y), ptx::ToHalf2<Element>(a.w),
                                         ptx::ToHalf2<Element>(b.y), ptx::ToHalf2<Element>(b.w)};
    } else {
      ptx::CopyAsync(ptx::SharedAddress(low), source, valid, policy);
      ptx::CopyAsync(ptx::SharedAddress(high), source + 1, valid, policy);
    }
  }
}

// Computes one split, up to the KV warps' results in the merge buffer. `loader` is at this split,
// and its first `prefetched` steps are in flight. On return the first args.prefetch_stages steps of
// the next split are, if kPrefetchesNextSplit. Called by the whole CTA.
template <class Traits>
__device__ void RunSplit(const VerifyArgs& args, const SharedStorage<Traits>& smem, int split,
                         int prefetched, KvLoader<Traits>* kv_loader) {
  KvLoader<Traits>& loader = *kv_loader;
  const SharedWorkTile& work_tile = *smem.work_tile;
  const int warp = threadIdx.x / 32;
  const int kv_warp = warp / Traits::kQueryWarps;
  const int first_row = warp % Traits::kQueryWarps * Traits::kWarpRows;
  // An mbarrier instead of bar.sync: compute-sanitizer's racecheck does not support bar.sync by
  // some of a CTA's warps. Every step synchronises twice, so the phases are always 0 and 1.
  const uint32_t barrier = ptx::SharedAddress(smem.barriers + kv_warp);
  const auto sync = [&](uint32_t parity) {
    if constexpr (Traits::kQueryWarps == 1) {
      __syncwarp();
    } else {
      mbarrier::Sync(barrier, parity);
    }
  };

  const int stages = args.stages;
#pragma unroll 1
  for (int step = prefetched; step < stages - 1; ++step) loader.Load(step, step);
  if (split == work_tile.plan.split_begin) {
    ptx::WaitCopies(stages - 1);  // for the queries, which were copied before the stages
    __syncthreads();
  }
  WarpAttention<Traits> attention(args, work_tile, ptx::SharedAddress(smem.query),
                                  smem.rows->position, first_row);
  int fill = stages - 1;
  int drain = 0;
  int step = 0;
  const auto load_then_wait = [&](auto load) {
    sync(0);  // the stage to fill is no longer read
    load(step + stages - 1, fill);
    fill = fill + 1 == stages ? 0 : fill + 1;
    ptx::WaitCopies(stages - 1);
    sync(1);  // this step's copies are visible to all query warps
    const uint32_t stage = loader.StageAddress(drain);
    drain = drain + 1 == stages ? 0 : drain + 1;
    return stage;
  };
  const int unmasked_begin = loader.unmasked_begin();
  const int unmasked_end = loader.unmasked_end() - (stages - 1);
#pragma unroll 1
  while (step < loader.num_steps()) {
    // Nearly all steps are unmasked. Their own loop keeps the rare cases out of its registers.
#pragma unroll 1
    while (step >= unmasked_begin && step < unmasked_end && loader.HasPages(step + stages - 1)) {
      const uint32_t stage =
          load_then_wait([&](int load, int at) { loader.LoadUnmasked(load, at); });
      attention.UnmaskedStep(stage);
      ++step;
    }
    const uint32_t stage = load_then_wait([&](int load, int at) { loader.Load(load, at); });
    const bool in_flight = step >= loader.num_prefix();
    if (Traits::kFloat8 && !in_flight && work_tile.plan.source != TokenSource::kCompact) {
      attention.BoundaryStep(stage, loader.PrefixToken(step), loader.prefix_end());
    } else {
      if (Traits::kFloat8 && step == loader.num_prefix()) {
        attention.ScaleOutput(work_tile.value_scale);
      }
      const int first = in_flight ? loader.InFlightRow(step) : loader.PrefixToken(step);
      attention.MaskedStep(stage, first, in_flight ? loader.in_flight_rows() : loader.prefix_end(),
                           in_flight);
    }
    ++step;
  }
  if (Traits::kFloat8 && loader.num_steps() == loader.num_prefix()) {
    attention.ScaleOutput(work_tile.value_scale);
  }
  int first_page = 0;
  const bool prefetches_next = Traits::kPrefetchesNextSplit && split + 1 < work_tile.plan.split_end;
  if (prefetches_next) first_page = loader.StartSplit(split + 1);
  __syncthreads();  // all stages have been read: the merge buffer takes the place of some
  attention.Store(smem.rows->max[kv_warp], smem.rows->sum[kv_warp],
                  smem.merge + kv_warp * Traits::kRowTile * Traits::kMergeStride);
  if (prefetches_next) {
    loader.SetFirstPage(first_page);
#pragma unroll 1
    for (int step = 0; step < args.prefetch_stages; ++step) loader.Load(step, step);
  }
  __syncthreads();
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerSm)
    VerifyKernel(const __grid_constant__ VerifyArgs args) {
  if constexpr (Traits::kIsBuilt) {
    extern __shared__ __align__(1024) uint8_t shared_bytes[];
    const SharedStorage<Traits> smem(shared_bytes, args);
    if (Traits::kQueryWarps > 1 && threadIdx.x < kKvWarps) {
      // RunWorkTiles synchronises the CTA before a KV warp uses its barrier.
      mbarrier::Init(ptx::SharedAddress(smem.barriers + threadIdx.x), 32 * Traits::kQueryWarps);
    }
    const CombineBuffer buffer = {ptx::SharedAddress(smem.stages),
                                  args.stages * kKvWarps * Traits::kStageBytes};
    RunWorkTiles<Traits>(args, smem.work_tile, smem.rows->position, buffer, [&] {
      LoadQueries<Traits>(args, smem.work_tile->plan, smem.query);
      ptx::CommitCopies();
      const WorkTile& plan = smem.work_tile->plan;
      KvLoader<Traits> loader(args, *smem.work_tile, ptx::SharedAddress(smem.stages),
                              threadIdx.x / 32 / Traits::kQueryWarps);
      int in_group = 0;
      for (int split = plan.split_begin; split < plan.split_end; ++split) {
        const bool prefetched = Traits::kPrefetchesNextSplit && split > plan.split_begin;
        if (!prefetched) loader.SetFirstPage(loader.StartSplit(split));
        RunSplit<Traits>(args, smem, split, prefetched ? args.prefetch_stages : 0, &loader);
        FinishSplit<Traits>(args, smem, split, in_group);
        in_group = NextInGroup(plan, in_group);
      }
    });
  }
}

}  // namespace nwor::sm80
