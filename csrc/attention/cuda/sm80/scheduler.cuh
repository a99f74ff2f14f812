#pragma once

#include "attention/cuda/combine.cuh"
#include "attention/cuda/work_tile.cuh"

// The persistent loop of an sm_80 CTA over the work tiles of the queue. A Traits type here has
// kFloat8, kRowTile and what combine.cuh asks for.

namespace nwor::sm80 {

// Loads work tile `index` into shared memory and completes it, and the rows' positions if there is
// a window. Called by the whole CTA, which must synchronise before it reads more than
// work_tile->plan.
template <class Traits>
__device__ void LoadWorkTile(const VerifyArgs& args, int index, SharedWorkTile* work_tile,
                             int32_t* positions) {
  if (threadIdx.x < sizeof(WorkTile) / sizeof(int4)) {
    reinterpret_cast<int4*>(&work_tile->plan)[threadIdx.x] =
        reinterpret_cast<const int4*>(args.work_tiles + index)[threadIdx.x];
  }
  __syncthreads();
  const WorkTile& plan = work_tile->plan;
  if (plan.request < 0) return;
  if (threadIdx.x == 0) {
    SetPageTable(args, work_tile);
    PrepareWorkTile<Traits>(args, work_tile);
  }
  if (args.params.window > 0 && threadIdx.x < Traits::kRowTile) {
    positions[threadIdx.x] = RowPosition(args, plan, threadIdx.x);
  }
}

// Takes work tiles from the queue until it is empty, then takes part in the combine. process()
// computes the one in `work_tile`, up to its output or partial result. `buffer` is the combine's
// shared memory. Called by the whole CTA.
template <class Traits, typename Process>
__device__ void RunWorkTiles(const VerifyArgs& args, SharedWorkTile* work_tile, int32_t* positions,
                             const CombineBuffer& buffer, Process process) {
  LaunchCounts counts;
  if (threadIdx.x == 0) counts.Read(args);
  int index = blockIdx.x;
  int num_work_tiles = 0;
  for (; index >= 0; ++num_work_tiles) {
    LoadWorkTile<Traits>(args, index, work_tile, positions);
    if (work_tile->plan.request < 0) return;
    uint32_t fetch = 0;
    if (threadIdx.x == 0) {
      if (num_work_tiles == 0) SignalStart(args, counts);
      fetch = FetchWorkTile(args);
    }
    __syncthreads();
    process();
    __syncthreads();
    if (threadIdx.x == 0) work_tile->queue.next_work_tile = NextWorkTile(args, counts, fetch);
    __syncthreads();
    index = work_tile->queue.next_work_tile;
  }
  if (threadIdx.x == 0) {
    work_tile->queue.counts = counts;
    work_tile->queue.ticket = kNoTicket;
  }
  __syncthreads();
  CombineAll<Traits>(args, work_tile, num_work_tiles, buffer);
}

}  // namespace nwor::sm80
