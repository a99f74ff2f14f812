#pragma once

#include "attention/cuda/sm90/kv_steps.cuh"
#include "attention/cuda/sm90/shared_storage.cuh"
#include "attention/cuda/sm90/tma.cuh"

namespace nwor::sm90 {

// A producer warp that issues the TMA loads of unmasked prefix steps. There are two: one loads K,
// the other V. They read nothing from global memory themselves, so they wait only for empty stages,
// and neither waits for the other.
template <class Traits>
class TmaProducer {
 public:
  __device__ TmaProducer(const VerifyArgs& args, const SharedStorage<Traits>& smem, bool values)
      : args_(args), smem_(smem), policy_(ptx::EvictFirstPolicy()), values_(values ? 1 : 0) {}

  __device__ void Run() {
    while (true) {
      mbarrier::Wait(smem_.work_tile_full(slot_.index), slot_.phase);
      const SharedWorkTile& work_tile = *smem_.work_tile(slot_.index);
      if (work_tile.is_end) return;
      const KvSteps<Traits> steps(args_.params, work_tile.plan);
#pragma unroll 1
      for (int step = 0; step < steps.num_steps; ++step) {
        if (steps.IsInFlight(step)) {
          HandToBoundaryProducer();
        } else {
          LoadStep(work_tile, steps, steps.PrefixStep(step));
        }
        stage_.Advance(args_.stages);
      }
      mbarrier::Arrive(smem_.work_tile_empty(slot_.index));
      slot_.Advance(2);
    }
  }

 private:
  static constexpr int kBlocks = KvSteps<Traits>::kBlocks;
  static constexpr int kPageBatchSteps = KvSteps<Traits>::kPageBatchSteps;

  __device__ static int lane() { return threadIdx.x % 32; }

  __device__ void WaitEmpty() const {
    const uint32_t empty =
        values_ ? smem_.values_empty(stage_.index) : smem_.keys_empty(stage_.index);
    mbarrier::Wait(empty, stage_.phase ^ 1);
  }

  __device__ void LoadStep(const SharedWorkTile& work_tile, const KvSteps<Traits>& steps,
                           int step) {
    const int in_batch = step % kPageBatchSteps;
    if (in_batch == 0) mbarrier::Wait(smem_.page_ids_full(page_batch_.index), page_batch_.phase);
    // Lane l loads the l-th block of 16 tokens.
    const int block = lane() % kBlocks;
    const int id = ptx::LoadShared32(smem_.page_ids +
                                     (page_batch_.index * 32 + in_batch * kBlocks + block) * 4);
    if (in_batch == kPageBatchSteps - 1 || step == steps.num_prefix() - 1) {
      mbarrier::Arrive(smem_.page_ids_empty(page_batch_.index));
      page_batch_.Advance(2);
    }
    if (!steps.IsUnmasked(step)) return HandToBoundaryProducer();
    const PagePosition at = LookUpPage(args_, work_tile, steps.PrefixToken(step) + block * 16, id);
    const CUtensorMap* map =
        args_.maps + (work_tile.plan.source == TokenSource::kCompact ? 2 : 0) + values_;
    WaitEmpty();
    if (lane() >= kBlocks) return;
    const uint32_t tile = values_ ? smem_.values(stage_.index) : smem_.keys(stage_.index);
    const uint32_t full = values_ ? smem_.values_full(stage_.index) : smem_.keys_full(stage_.index);
    mbarrier::ExpectTx(full, Traits::kKvTileBytes / kBlocks);
    mbarrier::Arrive(full, kBoundaryThreads / kBlocks);
#pragma unroll
    for (int atom = 0; atom < Traits::kAtoms; ++atom) {
      tma::LoadBox(tile + atom * Traits::kAtomStride + block * 16 * Traits::kAtomBytes, map, full,
                   atom * (Traits::kAtomBytes / 2), at.token, work_tile.plan.kv_head, at.page,
                   policy_);
    }
  }

  // Leaves the next stage to BoundaryProducer, once this warp's tile of it is empty.
  __device__ void HandToBoundaryProducer() {
    WaitEmpty();
    mbarrier::Wait(smem_.boundary_taken(), boundary_.phase ^ 1);
    mbarrier::Arrive(smem_.boundary_ready());
    boundary_.Advance(1);
  }

  const VerifyArgs& args_;
  const SharedStorage<Traits>& smem_;
  uint64_t policy_;
  int values_;                                          // 1: V, 0: K
  PipelineState slot_, page_batch_, stage_, boundary_;  // next
};

}  // namespace nwor::sm90
