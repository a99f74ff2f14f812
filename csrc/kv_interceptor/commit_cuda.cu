#include <algorithm>

#include "kv_interceptor/commit.h"
#include "kv_interceptor/commit_grid.h"
#include "kv_interceptor/commit_move.cuh"
#include "kv_interceptor/commit_summaries.cuh"
#include "kv_interceptor/commit_table.cuh"
#include "kv_interceptor/commit_validate.cuh"
#include "kv_interceptor/launch_check.h"

// One launch, no grid barrier. Each block takes one plane (K or V of one layer) and its share of
// the batch's rows: its warps start to load them, the whole batch is validated meanwhile, and
// stores only follow when nothing is wrong anywhere.
//
// Small batches are validated by a warp of their own: a warp that waits for its rows cannot think.

namespace nwor {
namespace {

// True in the one warp of the grid that publishes; asked by one warp of each block after the block
// has its verdict. Such a block reads no input that publishing changes, so its rows may still be on
// their way.
__device__ bool PublishesNow(const BatchTable& batch) {
  if (batch.ticket == nullptr) return blockIdx.x == 0 && blockIdx.y == 0;
  const uint32_t last = gridDim.x * gridDim.y - 1;
  bool publishes = false;
  if (threadIdx.x % 32 == 0) {
    __threadfence();
    publishes = atomicInc(batch.ticket, last) == last;
  }
  return __shfl_sync(0xffffffff, publishes, 0);
}

// A warp's part of a verdict, the same in all its lanes.
template <typename Team>
__device__ BatchVerdict CheckWarpShare(const BatchTable& batch, uint32_t* cells,
                                       const Entry& first) {
  int32_t num_accepted = 0;
  const uint32_t fault = CheckShare<Team>(batch, cells, first, num_accepted);
  return {__reduce_min_sync(0xffffffff, fault),
          static_cast<int32_t>(__reduce_add_sync(0xffffffff, num_accepted))};
}

// The whole block validates; ends with a barrier after which all threads know the same verdict.
__device__ BatchVerdict ValidateTogether(const BatchTable& batch, uint32_t* cells,
                                         const Entry& first, BatchVerdict& found) {
  ClearCells<BlockTeam>(batch, cells);
  if (threadIdx.x == 0) found = {kNoFault, 0};
  __syncthreads();
  const BatchVerdict warp = CheckWarpShare<BlockTeam>(batch, cells, first);
  if (threadIdx.x % 32 == 0) {
    if (warp.fault != kNoFault) atomicMin(&found.fault, warp.fault);
    if (warp.num_accepted != 0) atomicAdd(&found.num_accepted, warp.num_accepted);
  }
  __syncthreads();
  return found;
}

// kUniform: every group moves its rows by kOp, which is then known here; otherwise each block looks
// its op up, and loads only after the verdict.
// kSummaries: blocks of threads from summaries.num_planes on complete block summaries instead.
template <int kLayers, bool kUniform, RowOp kOp, bool kSummaries>
__global__ void __launch_bounds__(kCommitThreads, kUniform ? kCommitBlocksPerSm : 3)
    CommitKernel(const __grid_constant__ CommitTable<kLayers> table,
                 const __grid_constant__ SummaryArgument<kSummaries> summaries) {
  extern __shared__ uint32_t cells[];  // see InsertSlot
  __shared__ BatchVerdict found;
  const BatchTable& batch = table.batch;
  const Entry first = LoadEntry(batch, static_cast<int32_t>(threadIdx.x));
  const auto decide = [&] {
    const BatchVerdict verdict = ValidateTogether(batch, cells, first, found);
    // The last warp has the least to move, often nothing.
    if (threadIdx.x / 32 == kCommitWarps - 1 && PublishesNow(batch)) Publish(batch, verdict);
    return verdict.fault == kNoFault;
  };
  if constexpr (kSummaries) {
    if (blockIdx.x >= summaries.num_planes) {
      if (decide()) SummarizeShare(batch, table.layers, summaries, kCommitWarps);
      return;
    }
  }
  const Plane plane = SelectPlane(table, blockIdx.x);
  if constexpr (kUniform) {
    WarpShare<kOp> share(batch, plane);
    share.Start();
    if (decide()) share.Finish();
  } else if (decide()) {
    DispatchRowOp(plane.group.op, [&](auto op) {
      WarpShare<decltype(op)::value> share(batch, plane);
      share.Start();
      share.Finish();
    });
  }
}

// Where the verdict meets those who wait for it, from two places in the code.
__device__ void MeetAtVerdict() {
  asm volatile("barrier.sync 1, %0;" ::"n"(kSmallCommitThreads) : "memory");
}

// At most kSmallCommitEntries entries, all rows moved 16 bytes at a time.
template <int kLayers, bool kSummaries>
__global__ void __launch_bounds__(kSmallCommitThreads, kCommitBlocksPerSm)
    SmallCommitKernel(const __grid_constant__ CommitTable<kLayers> table,
                      const __grid_constant__ SummaryArgument<kSummaries> summaries) {
  __shared__ uint32_t cells[ChooseCommitCells(kSmallCommitEntries)];
  __shared__ BatchVerdict found;
  const BatchTable& batch = table.batch;
  if (threadIdx.x >= kCommitThreads) {
    const Entry first = LoadEntry(batch, static_cast<int32_t>(threadIdx.x % 32));
    ClearCells<WarpTeam>(batch, cells);
    __syncwarp();
    const BatchVerdict verdict = CheckWarpShare<WarpTeam>(batch, cells, first);
    if (threadIdx.x % 32 == 0) found = verdict;
    MeetAtVerdict();
    if (PublishesNow(batch)) Publish(batch, verdict);
    return;
  }
  if constexpr (kSummaries) {
    if (blockIdx.x >= summaries.num_planes) {
      MeetAtVerdict();
      if (found.fault == kNoFault) SummarizeShare(batch, table.layers, summaries, kCommitWarps);
      return;
    }
  }
  const Plane plane = SelectPlane(table, blockIdx.x);
  WarpShare<RowOp::kCopy16> share(batch, plane);
  share.Start();
  MeetAtVerdict();
  if (found.fault == kNoFault) share.Finish();
}

template <int kLayers, bool kSummaries>
void Launch(void (*kernel)(CommitTable<kLayers>, SummaryArgument<kSummaries>), int threads,
            const CommitTable<kLayers>& table, const CommitParams& params, int64_t shared_bytes) {
  constexpr int64_t kAlwaysAllowed = 48 * 1024 - sizeof(BatchVerdict);
  if (shared_bytes > kAlwaysAllowed) {
    CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shared_bytes)),
              "commit kernel's shared memory");
  }
  int64_t max_slices = 1;
  for (int g = 0; g < params.num_groups; ++g) {
    const int64_t slices = (table.batch.groups[g].shape.vectors_per_row + kCommitSliceVectors - 1) /
                           kCommitSliceVectors;
    max_slices = std::max(max_slices, slices * table.batch.num_positions);
  }
  const int32_t num_planes = 2 * params.num_layers;
  const int64_t by_memory =
      CurrentDeviceAttribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) /
      (shared_bytes + CurrentDeviceAttribute(cudaDevAttrReservedSharedMemoryPerBlock) +
       static_cast<int64_t>(sizeof(BatchVerdict)));
  const int32_t splits = ChooseCommitSplits(
      num_planes, max_slices, CurrentDeviceAttribute(cudaDevAttrMultiProcessorCount),
      static_cast<int32_t>(std::clamp<int64_t>(by_memory, 1, kCommitBlocksPerSm)));
  SummaryArgument<kSummaries> summaries{};
  if constexpr (kSummaries) summaries = MakeSummaryTable(params);
  const auto blocks = static_cast<unsigned>(num_planes + (kSummaries ? params.num_layers : 0));
  kernel<<<dim3(blocks, splits), threads, shared_bytes, static_cast<cudaStream_t>(params.stream)>>>(
      table, summaries);
  CheckCuda(cudaGetLastError(), "commit kernel");
}

template <int kLayers, bool kSummaries>
void Launch(const CommitParams& params) {
  const CommitTable<kLayers> table = MakeCommitTable<kLayers>(params);
  const bool copies = std::all_of(table.batch.groups, table.batch.groups + params.num_groups,
                                  [](const auto& group) { return group.op == RowOp::kCopy16; });
  const int64_t cell_bytes = int64_t{table.batch.num_cells} * 4;
  const auto launch = [&](auto kernel, int threads, int64_t shared_bytes) {
    Launch<kLayers, kSummaries>(kernel, threads, table, params, shared_bytes);
  };
  if (copies && table.batch.num_positions <= kSmallCommitEntries) {
    launch(SmallCommitKernel<kLayers, kSummaries>, kSmallCommitThreads, 0);
  } else if (copies) {
    launch(CommitKernel<kLayers, true, RowOp::kCopy16, kSummaries>, kCommitThreads, cell_bytes);
  } else {
    launch(CommitKernel<kLayers, false, RowOp::kCopy16, kSummaries>, kCommitThreads, cell_bytes);
  }
}

}  // namespace

void LaunchCommit(const CommitParams& params) {
  CheckCommitParams(params);
  NWOR_CHECK(params.ticket != nullptr || !PublishesLast(params),
             "ticket: got null, expected a zeroed word because tips are updated or status and "
             "round_status are one");
  const bool usual = params.num_layers <= kUsualLayers;
  if (params.summaries.kmax != nullptr) {
    NWOR_CHECK(params.num_groups == 1, "summaries: got ", params.num_groups,
               " cache groups, expected 1");
    usual ? Launch<kUsualLayers, true>(params) : Launch<kMaxCommitLayers, true>(params);
  } else {
    usual ? Launch<kUsualLayers, false>(params) : Launch<kMaxCommitLayers, false>(params);
  }
}

}  // namespace nwor
