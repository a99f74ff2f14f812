#pragma once

#include "attention/cuda/merge.cuh"
#include "attention/cuda/sm90/kv_steps.cuh"
#include "attention/cuda/sm90/queries.cuh"
#include "attention/cuda/sm90/shared_storage.cuh"
#include "base/cuda/dependent_launch.cuh"

namespace nwor::sm90 {

// The producer warp that fetches work tiles: it loads them into shared memory, with their queries
// (but for the first: CopyFirstQueries) and the page ids of their tokens, ahead of the other warps.
// It is the only warp that waits for its own loads from global memory, which take microseconds
// behind the token loads in flight.
template <class Traits>
class WorkProducer {
 public:
  // Only the warp for which `runs` is true may call Run. It reads the CTA's first work tile and the
  // counts before anything waits for another warp.
  __device__ WorkProducer(const VerifyArgs& args, const SharedStorage<Traits>& smem, bool runs)
      : args_(args), smem_(smem) {
    if (!runs) return;
    part_ = ReadPart(args.work_tiles + blockIdx.x);
    if (lane() == 0) {
      counts_.ReadPlan(args);
      if (!args.params.prefix_ready) counts_.ReadCounters(args);
    }
  }

  __device__ void Run() {
    int index = blockIdx.x;
    bool has_started = false;
    while (true) {
      SharedWorkTile* work_tile = smem_.work_tile(slot_.index);
      mbarrier::Wait(smem_.work_tile_empty(slot_.index), slot_.phase ^ 1);
      const int first_page = Publish(work_tile, index < 0);
      if (work_tile->is_end) return;
      slot_.Advance(2);
      const KvSteps<Traits> steps(args_.params, work_tile->plan);
      // Queries that stay in shared memory may be in use until the previous work tile ends.
      constexpr bool kLoadsQueries = SharedStorage<Traits>::kQueryBytes > 0;
      if constexpr (kLoadsQueries && Traits::kQueryInRegisters) {
        if (has_started) {
          LoadQueries(work_tile->plan);
        } else {
          query_.Advance(1);  // the consumers load them
        }
      }
      if (steps.num_prefix() > 0) StorePageIds(first_page);
      if (!has_started) Start();
      has_started = true;
      if constexpr (kLoadsQueries && !Traits::kQueryInRegisters) LoadQueries(work_tile->plan);
      for (int step = kPageBatchSteps; step < steps.num_prefix(); step += kPageBatchSteps) {
        StorePageIds(ReadPageIds(*work_tile, steps, step));
      }
      index = FetchNext();
    }
  }

 private:
  static constexpr int kChunks = Traits::kHeadDim / 8;
  static constexpr int kBlocks = KvSteps<Traits>::kBlocks;
  static constexpr int kPageBatchSteps = KvSteps<Traits>::kPageBatchSteps;

  __device__ static int lane() { return threadIdx.x % 32; }

  // Lane l reads the l-th part of a work tile.
  __device__ static int4 ReadPart(const WorkTile* work_tile) {
    if (lane() >= sizeof(WorkTile) / sizeof(int4)) return {};
    return reinterpret_cast<const int4*>(work_tile)[lane()];
  }

  // Called once the first tokens are on their way.
  __device__ void Start() {
    if (args_.params.prefix_ready) {
      WaitOnDependentGrids();
      LaunchDependentGrids();
      if (lane() == 0) counts_.ReadCounters(args_);
    }
    if (lane() == 0) SignalStart(args_, counts_);
  }

  // Fetches and reads the next work tile. Returns its index, or -1 if the queue is empty. It is
  // called when at most one batch of page ids of the current work tile is left, which balances the
  // load.
  __device__ int FetchNext() {
    mbarrier::Wait(smem_.page_ids_empty(page_batch_.index), page_batch_.phase ^ 1);
    int index = 0;
    if (lane() == 0) index = NextWorkTile(args_, counts_, FetchWorkTile(args_));
    index = __shfl_sync(0xffffffffu, index, 0);
    if (index >= 0) {
      part_ = ReadPart(args_.work_tiles + index);
      return index;
    }
    // The combine is prepared when all tokens are in flight: by then the other CTAs have started.
    PipelineState last = page_batch_;
    last.Advance(2);
    mbarrier::Wait(smem_.page_ids_empty(last.index), last.phase ^ 1);
    int output = -1;
    if (lane() == 0 && counts_.num_split_outputs > 0) {
      ticket_ = TakeTicket(args_, counts_);
      const CombineTeams<Traits> teams(args_, counts_, smem_.combine_buffer().bytes);
      if (ticket_ != kNoTicket) output = static_cast<int>(ticket_) / teams.units_per_output;
      if (output >= counts_.num_split_outputs) output = -1;
    }
    output = __shfl_sync(0xffffffffu, output, 0);
    part_ = output < 0 ? int4{-1, -1, -1, -1} : ReadPart(args_.split_outputs + output);
    return -1;
  }

  // Publishes what has been read in shared memory. Returns this lane's page id of the first batch,
  // whose load takes longest.
  __device__ int Publish(SharedWorkTile* work_tile, bool end) {
    if (lane() < sizeof(WorkTile) / sizeof(int4)) {
      reinterpret_cast<int4*>(&work_tile->plan)[lane()] = part_;
    }
    __syncwarp();
    if (lane() == 0) {
      work_tile->is_end = end || work_tile->plan.request < 0;
      if (!work_tile->is_end) SetPageTable(args_, work_tile);
    }
    __syncwarp();
    int first_page = 0;
    if (!work_tile->is_end) {
      first_page = ReadPageIds(*work_tile, KvSteps<Traits>(args_.params, work_tile->plan), 0);
    }
    if (lane() == 0) {
      if (work_tile->is_end) {
        work_tile->queue.counts = counts_;
        work_tile->queue.ticket = ticket_;
      } else {
        PrepareWorkTile<Traits>(args_, work_tile);
      }
    }
    __syncwarp();
    mbarrier::Arrive(smem_.work_tile_full(slot_.index));
    return first_page;
  }

  // Page ids of a batch of steps from prefix step `first` on.
  __device__ static int ReadPageIds(const SharedWorkTile& work_tile, const KvSteps<Traits>& steps,
                                    int first) {
    const int token = steps.PrefixToken(first + lane() / kBlocks) + lane() % kBlocks * 16;
    return ReadPageId(work_tile, token, steps.end);
  }
  __device__ void StorePageIds(int id) {
    mbarrier::Wait(smem_.page_ids_empty(page_batch_.index), page_batch_.phase ^ 1);
    ptx::StoreShared32(smem_.page_ids + (page_batch_.index * 32 + lane()) * 4, id);
    mbarrier::Arrive(smem_.page_ids_full(page_batch_.index));
    page_batch_.Advance(2);
  }

  // Loads the work tile's rows of Q. Other rows keep what was there; they do not affect the result.
  __device__ void LoadQueries(const WorkTile& plan) {
    mbarrier::Wait(smem_.query_empty(), query_.phase ^ 1);
#pragma unroll 4
    for (int i = lane(); i < plan.num_rows * kChunks; i += 32) {
      CopyQueryChunk<Traits>(args_, smem_, plan, i / kChunks, i % kChunks);
    }
    mbarrier::ArriveAfterCopies(smem_.query_full());
    query_.Advance(1);
  }

  const VerifyArgs& args_;
  const SharedStorage<Traits>& smem_;
  int4 part_ = {};
  LaunchCounts counts_;
  uint32_t ticket_ = kNoTicket;
  PipelineState slot_;        // of the next work tile
  PipelineState page_batch_;  // of the next page ids
  PipelineState query_;
};

}  // namespace nwor::sm90
