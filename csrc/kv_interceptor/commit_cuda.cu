#include <algorithm>
#include <type_traits>

#include "kv_interceptor/commit.h"
#include "kv_interceptor/commit_grid.h"
#include "kv_interceptor/commit_move.cuh"
#include "kv_interceptor/commit_summaries.cuh"
#include "kv_interceptor/commit_table.cuh"
#include "kv_interceptor/commit_tail.cuh"
#include "kv_interceptor/commit_validate.cuh"
#include "kv_interceptor/launch_check.h"

// One launch, no grid barrier. Each block takes one plane (K or V of one layer) and its share of
// the batch's rows: its warps start to load them, the whole batch is validated meanwhile, and
// stores only follow when nothing is wrong anywhere.
//
// Small batches are validated by a warp of their own: a warp that waits for its rows cannot think.
//
// A commit that serves partial views has no blocks of its own for them: whoever validates also sees
// whether any request completes a block or has a row 0 to copy, and only then do the warps that
// moved rows share out that work, when their own stores are on their way.

namespace nwor {
namespace {

struct ViewTable {
  SummaryTable summaries;
  TailTable tail;

  // Whether a valid batch leaves something to do for this request beyond moving its rows.
  __device__ bool Wants(const BatchTable& batch, int32_t request) const {
    if (summaries.to.kmax != nullptr) {
      const CompletedBlocks own = FindCompleted(summaries.to, request, batch.counts[request]);
      if (own.first < own.last) return true;
    }
    return tail.data[0] != nullptr && tail.params.begin[request] >= 0 &&
           tail.params.RootSlot(request) >= 0;
  }
};
struct NoViews {
  NoTail tail;
};
template <bool kViews>
using ViewArgument = std::conditional_t<kViews, ViewTable, NoViews>;

// This thread's part of the question whether views want anything. It is asked before the batch is
// known to be valid: a count may be anything, and the answer then means nothing.
template <typename Team, typename Views>
__device__ bool WantsShare(const BatchTable& batch, const Views& views) {
  bool wants = false;
  if constexpr (!std::is_same_v<Views, NoViews>) {
    const int32_t num_requests = batch.num_positions / batch.positions_per_request;
#pragma unroll 1
    for (auto request = static_cast<int32_t>(Team::Rank()); request < num_requests;
         request += static_cast<int32_t>(Team::kSize)) {
      wants |= views.Wants(batch, request);
    }
  }
  return wants;
}

// What all warps of a layer's two planes do once the batch is known to be valid. Neighbouring units
// go to different blocks: they take the same time.
template <RowOp kOp, int kLayers>
__device__ void ServeViews(const CommitTable<kLayers>& table, const ViewTable& views) {
  const auto layer = static_cast<int32_t>(blockIdx.x / 2);
  const auto num_blocks = static_cast<int32_t>(2 * gridDim.y);
  const auto block = static_cast<int32_t>(blockIdx.x % 2 * gridDim.y + blockIdx.y);
  const int32_t warp = static_cast<int32_t>(threadIdx.x / 32) * num_blocks + block;
  const int32_t num_warps = num_blocks * kCommitWarps;
  SummarizeShare(table.batch, table.layers[layer], layer, views.summaries, warp, num_warps);
  FeedRoots<kOp>(table.batch, table.layers[layer], layer, views.tail, warp, num_warps);
}

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
template <typename Team, typename Tail>
__device__ BatchVerdict CheckWarpShare(const BatchTable& batch, const Tail& tail, uint32_t* cells,
                                       const Entry& first) {
  int32_t num_accepted = 0;
  const uint32_t fault = CheckShare<Team>(batch, tail, cells, first, num_accepted);
  return {__reduce_min_sync(0xffffffff, fault),
          static_cast<int32_t>(__reduce_add_sync(0xffffffff, num_accepted))};
}

// The whole block validates; ends with a barrier after which all threads know the same verdict, and
// in `wanted` whether views want anything.
template <typename Views>
__device__ BatchVerdict ValidateTogether(const BatchTable& batch, const Views& views,
                                         uint32_t* cells, const Entry& first, BatchVerdict& found,
                                         bool& wanted) {
  ClearCells<BlockTeam>(batch, cells);
  constexpr bool kViews = !std::is_same_v<Views, NoViews>;
  if (threadIdx.x == 0) {
    found = {kNoFault, 0};
    if constexpr (kViews) wanted = false;
  }
  const bool wants = WantsShare<BlockTeam>(batch, views);
  __syncthreads();
  if (kViews && wants) wanted = true;
  const BatchVerdict warp = CheckWarpShare<BlockTeam>(batch, views.tail, cells, first);
  if (threadIdx.x % 32 == 0) {
    if (warp.fault != kNoFault) atomicMin(&found.fault, warp.fault);
    if (warp.num_accepted != 0) atomicAdd(&found.num_accepted, warp.num_accepted);
  }
  __syncthreads();
  return found;
}

// kUniform: every group moves its rows by kOp, which is then known here; otherwise each block looks
// its op up, and loads only after the verdict.
template <int kLayers, bool kUniform, RowOp kOp, bool kViews>
__global__ void __launch_bounds__(kCommitThreads, kUniform ? kCommitBlocksPerSm : 3)
    CommitKernel(const __grid_constant__ CommitTable<kLayers> table,
                 const __grid_constant__ ViewArgument<kViews> views) {
  using Tail = std::remove_cvref_t<decltype(views.tail)>;
  extern __shared__ uint32_t cells[];  // see InsertSlot
  __shared__ BatchVerdict found;
  __shared__ bool wanted;
  const BatchTable& batch = table.batch;
  const Entry first = LoadEntry(batch, static_cast<int32_t>(threadIdx.x));
  const auto decide = [&] {
    const BatchVerdict verdict = ValidateTogether(batch, views, cells, first, found, wanted);
    // The last warp has the least to move, often nothing.
    if (threadIdx.x / 32 == kCommitWarps - 1 && PublishesNow(batch)) {
      Announce(batch, views.tail, verdict);
    }
    return verdict.fault == kNoFault;
  };
  const Plane plane = SelectPlane(table, blockIdx.x);
  if constexpr (kUniform) {
    WarpShare<kOp, Tail> share(batch, plane, views.tail);
    share.Start();
    if (!decide()) return;
    share.Finish();
    if constexpr (kViews) {
      if (wanted) ServeViews<kOp>(table, views);
    }
  } else if (decide()) {
    DispatchRowOp(plane.group.op, [&](auto op) {
      WarpShare<decltype(op)::value, Tail> share(batch, plane, views.tail);
      share.Start();
      share.Finish();
      if constexpr (kViews) {
        if (wanted) ServeViews<decltype(op)::value>(table, views);
      }
    });
  }
}

// Where the verdict meets those who wait for it, from two places in the code.
__device__ void MeetAtVerdict() {
  asm volatile("barrier.sync 1, %0;" ::"n"(kSmallCommitThreads) : "memory");
}

// At most kSmallCommitEntries entries, all rows moved 16 bytes at a time.
template <int kLayers, bool kViews>
__global__ void __launch_bounds__(kSmallCommitThreads, kCommitBlocksPerSm)
    SmallCommitKernel(const __grid_constant__ CommitTable<kLayers> table,
                      const __grid_constant__ ViewArgument<kViews> views) {
  using Tail = std::remove_cvref_t<decltype(views.tail)>;
  __shared__ uint32_t cells[ChooseCommitCells(kSmallCommitEntries)];
  __shared__ BatchVerdict found;
  __shared__ bool wanted;
  const BatchTable& batch = table.batch;
  if (threadIdx.x >= kCommitThreads) {
    const Entry first = LoadEntry(batch, static_cast<int32_t>(threadIdx.x % 32));
    const bool wants = WantsShare<WarpTeam>(batch, views);
    ClearCells<WarpTeam>(batch, cells);
    __syncwarp();
    const BatchVerdict verdict = CheckWarpShare<WarpTeam>(batch, views.tail, cells, first);
    if constexpr (kViews) {
      const bool any = __any_sync(0xffffffff, wants);
      if (threadIdx.x % 32 == 0) wanted = any;
    }
    if (threadIdx.x % 32 == 0) found = verdict;
    MeetAtVerdict();
    if (PublishesNow(batch)) Announce(batch, views.tail, verdict);
    return;
  }
  const Plane plane = SelectPlane(table, blockIdx.x);
  WarpShare<RowOp::kCopy16, Tail> share(batch, plane, views.tail);
  share.Start();
  MeetAtVerdict();
  if (found.fault != kNoFault) return;
  share.Finish();
  if constexpr (kViews) {
    if (wanted) ServeViews<RowOp::kCopy16>(table, views);
  }
}

template <int kLayers, bool kViews>
void Launch(void (*kernel)(CommitTable<kLayers>, ViewArgument<kViews>), int threads,
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
  const int num_sms = CurrentDeviceAttribute(cudaDevAttrMultiProcessorCount);
  const auto blocks_per_sm =
      static_cast<int32_t>(std::clamp<int64_t>(by_memory, 1, kCommitBlocksPerSm));
  const int32_t splits = ChooseCommitSplits(num_planes, max_slices, num_sms, blocks_per_sm);
  ViewArgument<kViews> views{};
  if constexpr (kViews) views = {MakeSummaryTable(params), MakeTailTable(params)};
  const dim3 grid(static_cast<unsigned>(num_planes), static_cast<unsigned>(splits));
  kernel<<<grid, threads, shared_bytes, static_cast<cudaStream_t>(params.stream)>>>(table, views);
  CheckCuda(cudaGetLastError(), "commit kernel");
}

template <int kLayers, bool kViews>
void Launch(const CommitParams& params) {
  const CommitTable<kLayers> table = MakeCommitTable<kLayers>(params);
  const bool copies = std::all_of(table.batch.groups, table.batch.groups + params.num_groups,
                                  [](const auto& group) { return group.op == RowOp::kCopy16; });
  const int64_t cell_bytes = int64_t{table.batch.num_cells} * 4;
  const auto launch = [&](auto kernel, int threads, int64_t shared_bytes) {
    Launch<kLayers, kViews>(kernel, threads, table, params, shared_bytes);
  };
  if (copies && table.batch.num_positions <= kSmallCommitEntries) {
    launch(SmallCommitKernel<kLayers, kViews>, kSmallCommitThreads, 0);
  } else if (copies) {
    launch(CommitKernel<kLayers, true, RowOp::kCopy16, kViews>, kCommitThreads, cell_bytes);
  } else {
    launch(CommitKernel<kLayers, false, RowOp::kCopy16, kViews>, kCommitThreads, cell_bytes);
  }
}

}  // namespace

void LaunchCommit(const CommitParams& params) {
  CheckCommitParams(params);
  NWOR_CHECK(params.ticket != nullptr || !PublishesLast(params),
             "ticket: got null, expected a zeroed word because tips are updated or status and "
             "round_status are one");
  const bool usual = params.num_layers <= kUsualLayers;
  if (params.summaries.kmax != nullptr || params.tail.keys != nullptr) {
    NWOR_CHECK(params.num_groups == 1, "summaries, tail: got ", params.num_groups,
               " cache groups, expected 1");
    usual ? Launch<kUsualLayers, true>(params) : Launch<kMaxCommitLayers, true>(params);
  } else {
    usual ? Launch<kUsualLayers, false>(params) : Launch<kMaxCommitLayers, false>(params);
  }
}

}  // namespace nwor
