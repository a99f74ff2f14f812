#include <algorithm>
#include <type_traits>

#include "base/cuda/launch_check.h"
#include "kv_interceptor/commit/commit.h"
#include "kv_interceptor/commit/grid.h"
#include "kv_interceptor/commit/move.cuh"
#include "kv_interceptor/commit/table.cuh"
#include "kv_interceptor/commit/tail.cuh"
#include "kv_interceptor/commit/validate.cuh"
#include "kv_interceptor/commit/validate_small.cuh"
#include "kv_interceptor/commit/verdict.cuh"

// One launch, no grid barrier. Each block takes one plane (K or V of one layer) and its share of
// the batch's rows: its warps start to load them, the whole batch is validated meanwhile, and
// stores only follow when nothing is wrong anywhere.
//
// Small batches that are copied are validated by a warp of their own: a warp that waits for its
// rows cannot think.
//
// Rows 0 of compact views are copied by the warps that move rows, when their own stores are on
// their way.

namespace nwor {
namespace {

// What a commit does for partial views.
struct NoViews {
  static constexpr int kBlocksPerSm = kCommitBlocksPerSm;
  NoTail tail;
};
struct TailViews {
  static constexpr int kBlocksPerSm = 3;  // warps that store rows twice need more registers
  TailTable tail;
};
static_assert(sizeof(CommitTable<kUsualViewLayers>) + sizeof(TailViews) <= 4096);

// Copies rows 0 of the layer's requests. REQUIRES: the batch is valid.
template <RowOp kOp, int kLayers, typename Tail>
__device__ void CopyRoots(const CommitTable<kLayers>& table, const Tail& tail) {
  if constexpr (!std::is_same_v<Tail, NoTail>) {
    const auto layer = static_cast<int>(blockIdx.x / 2);
    const uint32_t warp = (threadIdx.x / 32 * 2 + blockIdx.x % 2) * gridDim.y + blockIdx.y;
    FeedRoots<kOp>(table.batch, table.layers[layer], layer, tail, warp,
                   2 * gridDim.y * kCommitWarps);
  }
}

// True in the one warp of the grid that publishes; asked by one warp of each block after the block
// has its verdict, which is the same in all of them. Where publishing changes what other blocks may
// still have to read for theirs, the last block does it. A block that has its verdict reads no such
// input any more, so its rows may still be on their way.
__device__ bool PublishesNow(const BatchTable& batch, const BatchVerdict& verdict) {
  const bool changes_inputs = batch.tips != nullptr || verdict.fault != kNoFault;
  if (batch.ticket == nullptr || !changes_inputs) return blockIdx.x == 0 && blockIdx.y == 0;
  const uint32_t last = gridDim.x * gridDim.y - 1;
  bool publishes = false;
  if (threadIdx.x % 32 == 0) {
    __threadfence();
    publishes = atomicInc(batch.ticket, last) == last;
  }
  return __shfl_sync(0xffffffff, publishes, 0);
}

// A warp's part of a verdict, the same in all its lanes.
template <typename Tail>
__device__ BatchVerdict CheckWarpShare(const BatchTable& batch, const Tail& tail, uint32_t* cells,
                                       const Entry& first) {
  int32_t num_accepted = 0;
  const uint32_t fault = CheckShare(batch, tail, cells, first, num_accepted);
  return {__reduce_min_sync(0xffffffff, fault),
          static_cast<int32_t>(__reduce_add_sync(0xffffffff, num_accepted))};
}

// kUniform: every group moves its rows by kOp, which is then known here; otherwise each block looks
// its op up, and loads only after the verdict. The warps that move rows validate together.
template <int kLayers, bool kUniform, RowOp kOp, typename Views>
__global__ void __launch_bounds__(kCommitThreads, Views::kBlocksPerSm - (kUniform ? 0 : 1))
    CommitKernel(const __grid_constant__ CommitTable<kLayers> table,
                 const __grid_constant__ Views views) {
  using Tail = std::remove_cvref_t<decltype(views.tail)>;
  extern __shared__ uint32_t cells[];  // see InsertSlot
  __shared__ VerdictPost<kCommitThreads> post;
  const BatchTable& batch = table.batch;
  const Plane plane = SelectPlane(table, blockIdx.x);
  const Entry first = LoadEntry(batch, static_cast<int32_t>(threadIdx.x));
  const auto open = [&] {
    ClearCells(batch, cells);
    post.Open();
  };
  const auto decide = [&] {
    post.Add(CheckWarpShare(batch, views.tail, cells, first));
    const BatchVerdict verdict = post.Await();
    // The last warp has the least to move, often nothing.
    if (threadIdx.x / 32 == kCommitWarps - 1 && PublishesNow(batch, verdict)) {
      Announce(batch, views.tail, verdict, LoadCounter(batch));
    }
    return verdict.fault == kNoFault;
  };
  if constexpr (kUniform) {
    WarpShare<kOp, Tail> share(batch, plane, views.tail);
    const Entry first_row = share.LoadFirst();
    open();
    share.Start(first_row);
    if (!decide()) return;
    share.Finish();
    CopyRoots<kOp>(table, views.tail);
  } else {
    open();
    if (!decide()) return;
    DispatchRowOp(plane.group.op, [&](auto op) {
      constexpr RowOp kGroupOp = decltype(op)::value;
      // Views have the cache's dtype, so nothing is quantised beside them.
      if constexpr (std::is_same_v<Tail, NoTail> || Copies(kGroupOp)) {
        WarpShare<kGroupOp, Tail> share(batch, plane, views.tail);
        share.Start(share.LoadFirst());
        share.Finish();
        CopyRoots<kGroupOp>(table, views.tail);
      }
    });
  }
}

// At most kSmallCommitEntries entries, copied as they are. kEasy: all groups are.
template <int kLayers, typename Views, bool kEasy>
__global__ void __launch_bounds__(kSmallCommitThreads, Views::kBlocksPerSm)
    SmallCommitKernel(const __grid_constant__ CommitTable<kLayers> table,
                      const __grid_constant__ Views views) {
  using Tail = std::remove_cvref_t<decltype(views.tail)>;
  __shared__ SmallSlots slots;
  __shared__ VerdictPost<kSmallCommitThreads> post;
  const BatchTable& batch = table.batch;
  if (threadIdx.x >= kCommitThreads) {
    const LaneEntries entries(batch);
    const int64_t counter = LoadCounter(batch);
    const BatchVerdict verdict = CheckSmallBatch(batch, views.tail, slots, entries);
    post.Post(verdict);
    if (PublishesNow(batch, verdict)) Announce(batch, views.tail, verdict, counter);
    return;
  }
  const Plane plane = SelectPlane(table, blockIdx.x);
  WarpShare<RowOp::kCopy16, Tail, kEasy> share(batch, plane, views.tail);
  share.Start(share.LoadFirst());
  if (post.Await().fault != kNoFault) return;
  share.Finish();
  CopyRoots<RowOp::kCopy16>(table, views.tail);
}

// Shared memory beside the cells, at most.
inline constexpr int64_t kOwnBytes = sizeof(VerdictPost<kCommitThreads>) + sizeof(SmallSlots);

template <typename Views>
Views MakeViews(const CommitParams& params) {
  if constexpr (std::is_same_v<Views, TailViews>) {
    return {MakeTailTable(params)};
  } else {
    return {};
  }
}

// How much of a device a commit can have.
struct CommitSpace {
  int32_t num_planes;
  int64_t num_slices;  // of a plane, at most
  int num_sms;
  int32_t blocks_per_sm;
};

template <typename Views>
CommitSpace FindSpace(const BatchTable& batch, const CommitParams& params, int64_t shared_bytes) {
  int64_t num_slices = 1;
  for (int g = 0; g < params.num_groups; ++g) {
    const int64_t slices = NumCommitSlices(batch.groups[g].shape.vectors_per_row);
    num_slices = std::max(num_slices, slices * batch.num_positions);
  }
  const int64_t by_memory =
      CurrentDeviceAttribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) /
      (shared_bytes + CurrentDeviceAttribute(cudaDevAttrReservedSharedMemoryPerBlock) + kOwnBytes);
  return {2 * params.num_layers, num_slices, CurrentDeviceAttribute(cudaDevAttrMultiProcessorCount),
          static_cast<int32_t>(std::clamp<int64_t>(by_memory, 1, Views::kBlocksPerSm))};
}

template <int kLayers, typename Views>
void Launch(void (*kernel)(CommitTable<kLayers>, Views), int32_t splits, int threads,
            int64_t shared_bytes, const CommitTable<kLayers>& table, const Views& views,
            const CommitParams& params) {
  const dim3 grid(static_cast<unsigned>(2 * params.num_layers), static_cast<unsigned>(splits));
  kernel<<<grid, threads, shared_bytes, static_cast<cudaStream_t>(params.stream)>>>(table, views);
  CheckCuda(cudaGetLastError(), "commit kernel");
}

template <int kLayers, typename Views, bool kEasy>
void LaunchSmall(const CommitTable<kLayers>& table, const CommitParams& params) {
  const CommitSpace space = FindSpace<Views>(table.batch, params, 0);
  Launch(SmallCommitKernel<kLayers, Views, kEasy>,
         ChooseCommitSplits(space.num_planes, space.num_slices, space.num_sms, space.blocks_per_sm),
         kSmallCommitThreads, 0, table, MakeViews<Views>(params), params);
}

template <int kLayers, bool kUniform, typename Views>
void LaunchAny(const CommitTable<kLayers>& table, const CommitParams& params) {
  const auto kernel = CommitKernel<kLayers, kUniform, RowOp::kCopy16, Views>;
  const int64_t cell_bytes = int64_t{table.batch.num_cells} * 4;
  constexpr int64_t kAlwaysAllowed = 48 * 1024 - kOwnBytes;
  if (cell_bytes > kAlwaysAllowed) {
    CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(cell_bytes)),
              "commit kernel's shared memory");
  }
  const CommitSpace space = FindSpace<Views>(table.batch, params, cell_bytes);
  Launch(kernel,
         ChooseCommitSplits(space.num_planes, space.num_slices, space.num_sms, space.blocks_per_sm),
         kCommitThreads, cell_bytes, table, MakeViews<Views>(params), params);
}

template <int kLayers, typename Views>
void Launch(const CommitParams& params) {
  const CommitTable<kLayers> table = MakeCommitTable<kLayers>(params);
  const auto all = [&](auto&& is) {
    return std::all_of(table.batch.groups, table.batch.groups + params.num_groups, is);
  };
  if (!all([](const GroupTable& group) { return group.op == RowOp::kCopy16; })) {
    LaunchAny<kLayers, /*kUniform=*/false, Views>(table, params);
  } else if (table.batch.num_positions > kSmallCommitEntries) {
    LaunchAny<kLayers, /*kUniform=*/true, Views>(table, params);
  } else if (!all([](const GroupTable& group) { return group.easy(); })) {
    LaunchSmall<kLayers, Views, /*kEasy=*/false>(table, params);
  } else {
    // Where rows go to two places, what this gains is not worth a kernel.
    LaunchSmall<kLayers, Views, std::is_same_v<Views, NoViews>>(table, params);
  }
}

template <int kUsual, typename Views>
void LaunchForLayers(const CommitParams& params) {
  params.num_layers <= kUsual ? Launch<kUsual, Views>(params)
                              : Launch<kMaxCommitLayers, Views>(params);
}

}  // namespace

void LaunchCommit(const CommitParams& params) {
  CheckCommitParams(params);
  NWOR_CHECK(
      params.ticket != nullptr || !PublishesLast(params),
      "ticket: got null, expected a zeroed word because tips or round_status are updated, or "
      "status and round_status are one");
  const bool feeds = params.tail.keys != nullptr;
  NWOR_CHECK(params.num_groups == 1 || !feeds, "tail: got ", params.num_groups,
             " cache groups, expected 1");
  if (feeds) {
    LaunchForLayers<kUsualViewLayers, TailViews>(params);
  } else {
    LaunchForLayers<kUsualLayers, NoViews>(params);
  }
}

}  // namespace nwor
