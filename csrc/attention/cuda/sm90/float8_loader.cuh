#pragma once

#include "attention/cuda/sm90/kv_steps.cuh"
#include "attention/cuda/sm90/shared_storage.cuh"
#include "attention/cuda/sm90/tma.cuh"

namespace nwor::sm90 {

// The producer warp that loads float8 tokens of the pages into raw stages: whole steps with TMA,
// steps at an end of the prefix or of a window with cp.async. It waits for no load of its own.
// Float8Widener has the barriers.
//
// K of a step is loaded before its V. The widening warps use V up to one step later than K, so by
// the time V's raw tile is empty the next step's K tile is, too, or soon will be.
template <class Traits>
class Float8Loader {
 public:
  __device__ Float8Loader(const VerifyArgs& args, const SharedStorage<Traits>& smem)
      : args_(args), smem_(smem), policy_(ptx::EvictFirstPolicy()) {}

  __device__ void Run() {
    while (true) {
      mbarrier::Wait(smem_.work_tile_full(slot_.index), slot_.phase);
      const SharedWorkTile& work_tile = *smem_.work_tile(slot_.index);
      if (work_tile.is_end) return;
      const KvSteps<Traits> steps(args_.params, work_tile.plan);
#pragma unroll 1
      for (int step = 0; step < steps.num_prefix(); ++step) LoadStep(work_tile, steps, step);
      mbarrier::Arrive(smem_.work_tile_empty(slot_.index));
      slot_.Advance(2);
    }
  }

 private:
  using RawLayout = RowSwizzle<Traits::kHeadDim>;
  static constexpr int kBlocks = KvSteps<Traits>::kBlocks;
  static constexpr int kPageBatchSteps = KvSteps<Traits>::kPageBatchSteps;
  static constexpr int kBlockBytes = Traits::kRawTileBytes / kBlocks;

  __device__ static int lane() { return threadIdx.x % 32; }

  // Loads prefix step `step`.
  __device__ void LoadStep(const SharedWorkTile& work_tile, const KvSteps<Traits>& steps,
                           int step) {
    const int in_batch = step % kPageBatchSteps;
    if (in_batch == 0) mbarrier::Wait(smem_.page_ids_full(page_batch_.index), page_batch_.phase);
    // Lane l has the l-th block of 16 tokens.
    const int block = lane() % kBlocks;
    const int id = ptx::LoadShared32(smem_.page_ids +
                                     (page_batch_.index * 32 + in_batch * kBlocks + block) * 4);
    if (in_batch == kPageBatchSteps - 1 || step == steps.num_prefix() - 1) {
      mbarrier::Arrive(smem_.page_ids_empty(page_batch_.index));
      page_batch_.Advance(2);
    }
    // The widening warps read compact views themselves.
    if (work_tile.plan.source == TokenSource::kCompact) return;
    if (steps.IsUnmasked(step)) {
      const PagePosition at =
          LookUpPage(args_, work_tile, steps.PrefixToken(step) + block * 16, id);
#pragma unroll
      for (int values = 0; values < 2; ++values) {
        WaitEmpty(values);
        if (lane() >= kBlocks) continue;
        const uint32_t full = smem_.raw_full(raw_.index, values);
        mbarrier::ExpectTx(full, kBlockBytes);
        mbarrier::Arrive(full, 32 / kBlocks);
        tma::LoadBox(smem_.raw_tile(raw_.index, values) + block * kBlockBytes, args_.maps + values,
                     full, 0, at.token, work_tile.plan.kv_head, at.page, policy_);
      }
    } else {
#pragma unroll 1
      for (int values = 0; values < 2; ++values) {
        WaitEmpty(values);
        CopyBoundary(work_tile, steps, steps.PrefixToken(step), id, values);
        mbarrier::ArriveAfterCopies(smem_.raw_full(raw_.index, values));
      }
    }
    raw_.Advance(args_.raw_stages);
  }

  __device__ void WaitEmpty(int values) const {
    mbarrier::Wait(smem_.raw_empty(raw_.index, values), raw_.phase ^ 1);
    __syncwarp();
  }

  // Copies the tokens from `first` on that exist and that some row sees; the others become zeros.
  // Lane l has the page id of the l-th block.
  __device__ void CopyBoundary(const SharedWorkTile& work_tile, const KvSteps<Traits>& steps,
                               int first, int id, int values) const {
    const PagedKv& kv = work_tile.kv;
    constexpr int kChunks = Traits::kHeadDim / 16;
    const int64_t stride = values ? kv.value_token : kv.key_token;
    const uint32_t tile = smem_.raw_tile(raw_.index, values);
#pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      const int token = first + block * 16;
      const int block_id = __shfl_sync(0xffffffffu, id, block);
      const int valid_begin = max(work_tile.plan.token_begin - token, 0);
      const int valid_end = min(steps.end - token, 16);
      KvOffsets at = {};
      if (valid_begin < valid_end) at = LookUpKv(args_, work_tile, token, block_id);
      const char* rows = values ? kv.values + at.value : kv.keys + at.key;
#pragma unroll 2
      for (int i = lane(); i < 16 * kChunks; i += 32) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        const bool valid = row >= valid_begin && row < valid_end;
        // An invalid row is not read; the query serves as an address.
        const char* source =
            valid ? rows + row * stride + chunk * 16 : static_cast<const char*>(args_.params.query);
        ptx::CopyAsync(tile + RawLayout::Offset(block * 16 + row, chunk), source, valid);
      }
    }
  }

  const VerifyArgs& args_;
  const SharedStorage<Traits>& smem_;
  uint64_t policy_;
  PipelineState slot_, page_batch_, raw_;  // next
};

}  // namespace nwor::sm90
