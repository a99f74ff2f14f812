#pragma once

#include "attention/cuda/sm90/kv_steps.cuh"
#include "attention/cuda/sm90/mask.cuh"
#include "attention/cuda/sm90/shared_storage.cuh"
#include "attention/cuda/sm90/warpgroup.cuh"
#include "base/cuda/dependent_launch.cuh"

namespace nwor::sm90 {

// The producer warp for boundary steps: it fills the stages that TMA cannot, with cp.async. These
// are in-flight rows, and prefix tokens of which some do not exist or lie outside some row's
// window.
template <class Traits>
class BoundaryProducer {
 public:
  __device__ BoundaryProducer(const VerifyArgs& args, const SharedStorage<Traits>& smem)
      : args_(args), smem_(smem) {}

  __device__ void Run() {
    PipelineState slot, stage, boundary;
    if (args_.params.prefix_ready) WaitOnDependentGrids();
    while (true) {
      mbarrier::Wait(smem_.work_tile_full(slot.index), slot.phase);
      const SharedWorkTile& work_tile = *smem_.work_tile(slot.index);
      if (work_tile.is_end) return;
      const KvSteps<Traits> steps(args_.params, work_tile.plan);
#pragma unroll 1
      for (int step = 0; step < steps.num_steps; ++step) {
        const int prefix_step = steps.PrefixStep(step);
        const bool in_flight = steps.IsInFlight(step);
        if (in_flight || !steps.IsUnmasked(prefix_step)) {
          mbarrier::Wait(smem_.boundary_ready(), boundary.phase);
          mbarrier::Arrive(smem_.boundary_taken());
          boundary.Advance(1);
          Fill(work_tile, steps, in_flight,
               in_flight ? steps.InFlightRow(step) : steps.PrefixToken(prefix_step), stage.index);
        }
        stage.Advance(args_.stages);
      }
      mbarrier::Arrive(smem_.work_tile_empty(slot.index));
      slot.Advance(2);
    }
  }

 private:
  static constexpr int kChunks = Traits::kHeadDim / 8;

  // Loads the tree mask of the work tile's rows for the in-flight rows from `first` on.
  __device__ void CopyMask(const WorkTile& plan, int first, int stage) const {
    const StageMask mask(args_, plan);
    const int lane = threadIdx.x % 32;
    if (args_.params.tree_mask == nullptr || !mask.fits() || lane >= mask.count) return;
    ptx::CopyAsync8(smem_.mask(stage) + lane * 8,
                    StageMask::Word(args_.params, plan, mask.first + lane, first));
  }

  // Fills a stage. `first` is the step's first prefix token or in-flight row. Rows that do not
  // exist or that no row sees become zeros in V and stay undefined in K. A step of up to 16 tokens
  // fills one block only; the consumers read no more. The copies have no cache policy: ptxas
  // (CUDA 13.0) would turn it into an instruction that the device rejects here.
  __device__ void Fill(const SharedWorkTile& work_tile, const KvSteps<Traits>& steps,
                       bool in_flight, int first, int stage) const {
    const VerifyParams& p = args_.params;
    const int tokens = (in_flight ? steps.in_flight_rows : steps.end) - first;
    const int blocks = tokens > 16 ? KvSteps<Traits>::kBlocks : 1;
    if (in_flight) CopyMask(work_tile.plan, first, stage);
    for (int block = 0; block < blocks; ++block) {
      const int token = first + block * 16;
      const int valid_begin = (in_flight ? 0 : work_tile.plan.token_begin) - token;
      const int valid_end = tokens - block * 16;
      const TokenRows rows =
          LocateRows(work_tile, steps, in_flight, token, valid_begin < min(16, valid_end));
#pragma unroll 2
      for (int i = threadIdx.x % 32; i < 16 * kChunks; i += 32) {
        const int row = i / kChunks;
        const int chunk = i % kChunks;
        const bool valid = row >= valid_begin && row < valid_end;
        const uint32_t to = smem_.keys(stage) + ChunkOffset<Traits>(block * 16 + row, chunk);
        if (valid) ptx::CopyAsync(to, rows.keys + row * rows.key_stride + chunk * 16);
        // An invalid row is not read; the query serves as an address.
        const char* source = valid ? rows.values + row * rows.value_stride + chunk * 16
                                   : static_cast<const char*>(p.query);
        ptx::CopyAsync(to + Traits::kKvTileBytes, source, valid);
      }
    }
    ptx::CommitCopies();
    ptx::WaitCopies<0>();
    wgmma::FenceShared();
    mbarrier::Arrive(smem_.keys_full(stage));
    mbarrier::Arrive(smem_.values_full(stage));
  }

  struct TokenRows {
    const char* keys;
    const char* values;
    int64_t key_stride, value_stride;
  };
  __device__ TokenRows LocateRows(const SharedWorkTile& work_tile, const KvSteps<Traits>& steps,
                                  bool in_flight, int token, bool exists) const {
    const VerifyParams& p = args_.params;
    const PagedKv& kv = work_tile.kv;
    if (in_flight) {
      const int64_t head = work_tile.plan.kv_head;
      const int64_t row = work_tile.plan.query_start + token;
      const int64_t key_row = p.key_strides.row * 2;
      const int64_t value_row = p.value_strides.row * 2;
      return {static_cast<const char*>(p.key) + row * key_row + head * p.key_strides.head * 2,
              static_cast<const char*>(p.value) + row * value_row + head * p.value_strides.head * 2,
              key_row, value_row};
    }
    KvOffsets at = {};
    if (exists) at = LookUpKv(args_, work_tile, token, ReadPageId(work_tile, token, steps.end));
    return {kv.keys + at.key, kv.values + at.value, kv.key_token, kv.value_token};
  }

  const VerifyArgs& args_;
  const SharedStorage<Traits>& smem_;
};

}  // namespace nwor::sm90
