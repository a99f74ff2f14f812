#include <algorithm>
#include <type_traits>

#include "kv_interceptor/commit.h"
#include "kv_interceptor/commit_grid.h"
#include "kv_interceptor/commit_move.cuh"
#include "kv_interceptor/commit_summaries.cuh"
#include "kv_interceptor/commit_summary_share.cuh"
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
// A commit that serves partial views has no blocks of its own for them: the warps that move rows
// find out by themselves whether they have a block to complete or a row 0 to copy, while they wait
// for the verdict or for their rows, and do it when their own stores are on their way.

namespace nwor {
namespace {

struct ViewTable {
  SummaryTable summaries;
  TailTable tail;
};
struct NoViews {
  NoTail tail;
};
template <bool kViews>
using ViewArgument = std::conditional_t<kViews, ViewTable, NoViews>;

// What one of the warps of a layer's two planes does for partial views. Neighbouring units go to
// different blocks: they take the same time.
template <int kLayers>
class ViewShare {
 public:
  // The first loads are on their way when it has been made.
  __device__ ViewShare(const CommitTable<kLayers>& table, const ViewTable& views)
      : table_(table),
        views_(views),
        num_warps_(2 * gridDim.y * kCommitWarps),
        warp_((threadIdx.x / 32 * 2 + blockIdx.x % 2) * gridDim.y + blockIdx.y),
        requests_(views.summaries.to.kmax == nullptr
                      ? LaneRequests()
                      : LaneRequests(table.batch, views.summaries, 0)),
        summaries_({table.batch, layer(), views.summaries, layer_idx()}, warp_, num_warps_) {}

  // May be called before the batch is known to be valid.
  __device__ void Start() {
    if (views_.summaries.to.kmax != nullptr) summaries_.Start(requests_);
  }

  // REQUIRES: the batch is valid, and Start was called.
  __device__ void FinishSummaries() {
    if (views_.summaries.to.kmax != nullptr) summaries_.Finish();
  }

  // REQUIRES: the batch is valid.
  template <RowOp kOp>
  __device__ void CopyRoots() const {
    if (views_.tail.data[0] != nullptr) {
      FeedRoots<kOp>(table_.batch, layer(), layer_idx(), views_.tail, warp_, num_warps_);
    }
  }

 private:
  __device__ static int layer_idx() { return static_cast<int>(blockIdx.x / 2); }
  __device__ const LayerTable& layer() const { return table_.layers[layer_idx()]; }

  const CommitTable<kLayers>& table_;
  const ViewTable& views_;
  const uint32_t num_warps_;
  const uint32_t warp_;
  const LaneRequests requests_;
  SummaryShare summaries_;
};
struct NoViewShare {
  template <typename Table>
  __device__ NoViewShare(const Table&, const NoViews&) {}
  __device__ void Start() {}
  __device__ void FinishSummaries() {}
  template <RowOp kOp>
  __device__ void CopyRoots() const {}
};
template <int kLayers, bool kViews>
using ViewShareOf = std::conditional_t<kViews, ViewShare<kLayers>, NoViewShare>;

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

// The whole block validates; ends with a barrier after which all threads know the same verdict.
template <typename Tail>
__device__ BatchVerdict ValidateTogether(const BatchTable& batch, const Tail& tail, uint32_t* cells,
                                         const Entry& first, BatchVerdict& found) {
  ClearCells<BlockTeam>(batch, cells);
  if (threadIdx.x == 0) found = {kNoFault, 0};
  __syncthreads();
  const BatchVerdict warp = CheckWarpShare<BlockTeam>(batch, tail, cells, first);
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
  const BatchTable& batch = table.batch;
  const Entry first = LoadEntry(batch, static_cast<int32_t>(threadIdx.x));
  const auto decide = [&] {
    const BatchVerdict verdict = ValidateTogether(batch, views.tail, cells, first, found);
    // The last warp has the least to move, often nothing.
    if (threadIdx.x / 32 == kCommitWarps - 1 && PublishesNow(batch)) {
      Announce(batch, views.tail, verdict);
    }
    return verdict.fault == kNoFault;
  };
  const Plane plane = SelectPlane(table, blockIdx.x);
  ViewShareOf<kLayers, kViews> view_share(table, views);
  if constexpr (kUniform) {
    WarpShare<kOp, Tail> share(batch, plane, views.tail);
    share.Start();
    if (!decide()) return;
    if constexpr (kViews) {
      if (share.more()) share.Advance();  // the next rows are on their way in the meantime
      view_share.Start();
    }
    share.Finish();
    view_share.FinishSummaries();
    view_share.template CopyRoots<kOp>();
  } else if (decide()) {
    DispatchRowOp(plane.group.op, [&](auto op) {
      WarpShare<decltype(op)::value, Tail> share(batch, plane, views.tail);
      share.Start();
      share.Finish();
      view_share.template CopyRoots<decltype(op)::value>();
    });
    view_share.Start();
    view_share.FinishSummaries();
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
  const BatchTable& batch = table.batch;
  if (threadIdx.x >= kCommitThreads) {
    const Entry first = LoadEntry(batch, static_cast<int32_t>(threadIdx.x % 32));
    ClearCells<WarpTeam>(batch, cells);
    __syncwarp();
    const BatchVerdict verdict = CheckWarpShare<WarpTeam>(batch, views.tail, cells, first);
    if (threadIdx.x % 32 == 0) found = verdict;
    MeetAtVerdict();
    if (PublishesNow(batch)) Announce(batch, views.tail, verdict);
    return;
  }
  const Plane plane = SelectPlane(table, blockIdx.x);
  ViewShareOf<kLayers, kViews> view_share(table, views);
  WarpShare<RowOp::kCopy16, Tail> share(batch, plane, views.tail);
  share.Start();
  view_share.Start();
  MeetAtVerdict();
  if (found.fault != kNoFault) return;
  share.Finish();
  view_share.FinishSummaries();
  view_share.template CopyRoots<RowOp::kCopy16>();
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
