#pragma once

#include "attention/cuda/merge.cuh"
#include "attention/cuda/sm90/shared_storage.cuh"

namespace nwor::sm90 {

// Starts the copy of 16 bytes of a work tile's packed row of Q to shared memory.
template <class Traits>
__device__ void CopyQueryChunk(const VerifyArgs& args, const SharedStorage<Traits>& smem,
                               const WorkTile& plan, int row, int chunk) {
  const VerifyParams& p = args.params;
  const OutputRow at = LocateRow(args, plan, row);
  const auto* source = static_cast<const typename Traits::Element*>(p.query) +
                       at.row * p.query_strides.row + at.head * p.query_strides.head + chunk * 8;
  ptx::CopyAsync(smem.query + QueryOffset<Traits>(row, chunk), source);
}

// Copies the queries of a CTA's first work tile, each consumer warp those that it reads itself. The
// consumers have nothing else to do yet; behind so many copies of one warp the first page ids, and
// with them the first tokens, would be late. Other rows keep what was there.
template <class Traits>
__device__ void CopyFirstQueries(const VerifyArgs& args, const SharedStorage<Traits>& smem,
                                 const WorkTile& plan) {
  constexpr int kRows = 8 * Traits::kHalves;  // of a warp
  constexpr int kChunks = Traits::kHeadDim / 8;
  const int first = static_cast<int>(threadIdx.x) / 32 * kRows;
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < kRows * kChunks; i += 32) {
    const int row = first + i / kChunks;
    if (row < plan.num_rows) CopyQueryChunk<Traits>(args, smem, plan, row, i % kChunks);
  }
  ptx::CommitCopies();
  ptx::WaitCopies<0>();
  __syncwarp();
}

}  // namespace nwor::sm90
