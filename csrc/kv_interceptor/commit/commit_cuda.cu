#include <algorithm>
#include <type_traits>

#include "base/cuda/launch_check.h"
#include "kv_interceptor/commit/commit.h"
#include "kv_interceptor/commit/grid.h"
#include "kv_interceptor/commit/move.cuh"
#include "kv_interceptor/commit/summaries.cuh"
#include "kv_interceptor/commit/summary_fetch.cuh"
#include "kv_interceptor/commit/summary_warp.cuh"
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
// Block summaries have warps of their own, too, which start at once. Those that move rows hear of
// them only whether to help, because many blocks are due: in small batches with the verdict, before
// which it is known, in others when their own rows are moved. Rows 0 of compact views are copied by
// those that move rows, when their own stores are on their way.

namespace nwor {
namespace {

// What a commit does for partial views.
struct NoViews {
  static constexpr bool kSummaries = false;
  static constexpr int kBlocksPerSm = kCommitBlocksPerSm;
  NoTail tail;
};
struct SummaryViews {
  static constexpr bool kSummaries = true;
  static constexpr int kBlocksPerSm = kCommitBlocksPerSm;
  SummaryTable summaries;
  NoTail tail;
};
struct AllViews {
  static constexpr bool kSummaries = true;  // possibly none: then no warp is theirs
  static constexpr int kBlocksPerSm = 3;    // warps that store rows twice need more registers
  SummaryTable summaries;
  TailTable tail;
};
static_assert(sizeof(CommitTable<kUsualViewLayers>) + sizeof(AllViews) <= 4096);

// The roles of a small commit's threads are known when it is compiled, and so is how many meet at
// each barrier.
constexpr BlockRoles SmallCommitRoles(int summary_warps) {
  return {kCommitThreads - 32 * summary_warps, 32 * summary_warps,
          kSmallCommitThreads - kCommitThreads};
}
template <typename Views>
__device__ BlockRoles CommitRoles(const Views& views) {
  int summaries = 0;
  if constexpr (Views::kSummaries) {
    if (views.summaries.to.kmax != nullptr) summaries = kSummaryThreads;
  }
  return {kCommitThreads, summaries, 0};
}

// Copies rows 0 of the layer's requests. REQUIRES: the batch is valid.
template <RowOp kOp, int kLayers, typename Tail>
__device__ void CopyRoots(const CommitTable<kLayers>& table, const Tail& tail,
                          const BlockRoles& roles) {
  if constexpr (!std::is_same_v<Tail, NoTail>) {
    if (tail.data[0] == nullptr) return;
    const auto layer = static_cast<int>(blockIdx.x / 2);
    const uint32_t warp = (threadIdx.x / 32 * 2 + blockIdx.x % 2) * gridDim.y + blockIdx.y;
    FeedRoots<kOp>(table.batch, table.layers[layer], layer, tail, warp,
                   2 * gridDim.y * static_cast<uint32_t>(roles.rows / 32));
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
__global__ void __launch_bounds__(kCommitThreads + (Views::kSummaries ? kSummaryThreads : 0),
                                  Views::kBlocksPerSm - (kUniform ? 0 : 1))
    CommitKernel(const __grid_constant__ CommitTable<kLayers> table,
                 const __grid_constant__ Views views) {
  using Tail = std::remove_cvref_t<decltype(views.tail)>;
  extern __shared__ uint32_t cells[];  // see InsertSlot
  __shared__ VerdictPost post;
  __shared__ SummaryHelp help;
  const BlockRoles roles = CommitRoles(views);
  if constexpr (Views::kSummaries) {
    if (threadIdx.x >= kCommitThreads) {
      if (CompleteSummaries<NoEntries, kSummaryUnits>(table, views.summaries, roles, post, help)) {
        SummarizeOthers<kSummaryUnits>(table, views.summaries, roles);
      }
      return;
    }
  }
  const BatchTable& batch = table.batch;
  const Plane plane = SelectPlane(table, blockIdx.x);
  const Entry first = LoadEntry(batch, static_cast<int32_t>(threadIdx.x));
  const auto open = [&] {
    ClearCells(batch, cells);
    post.Open(roles);
  };
  const auto decide = [&] {
    post.Add(CheckWarpShare(batch, views.tail, cells, first), roles);
    const BatchVerdict verdict = post.Await(roles);
    // The last warp has the least to move, often nothing.
    if (threadIdx.x / 32 == kCommitWarps - 1 && PublishesNow(batch, verdict)) {
      Announce(batch, views.tail, verdict, LoadCounter(batch));
    }
    return verdict.fault == kNoFault;
  };
  if constexpr (kUniform) {
    WarpShare<kOp, Tail> share(batch, plane, views.tail, roles);
    const Entry first_row = share.LoadFirst();
    open();
    share.Start(first_row);
    if (!decide()) return;
    share.Finish();
    CopyRoots<kOp>(table, views.tail, roles);
  } else {
    open();
    if (!decide()) return;
    DispatchRowOp(plane.group.op, [&](auto op) {
      WarpShare<decltype(op)::value, Tail> share(batch, plane, views.tail, roles);
      share.Start(share.LoadFirst());
      share.Finish();
      CopyRoots<decltype(op)::value>(table, views.tail, roles);
    });
  }
  if constexpr (Views::kSummaries) {
    if (roles.summaries == 0 || !help.Await(roles)) return;
    SummarizeOthers<kSummaryUnits>(table, views.summaries, roles);
  }
}

// At most kSmallCommitEntries entries, copied as they are. With summaries: of no more requests than
// a warp has lanes, by so many warps. kEasy: all groups are.
template <int kLayers, typename Views, int kSummaryWarps, bool kEasy>
__global__ void __launch_bounds__(kSmallCommitThreads, Views::kBlocksPerSm)
    SmallCommitKernel(const __grid_constant__ CommitTable<kLayers> table,
                      const __grid_constant__ Views views) {
  using Tail = std::remove_cvref_t<decltype(views.tail)>;
  constexpr BlockRoles kRoles = SmallCommitRoles(kSummaryWarps);
  __shared__ SmallSlots slots;
  __shared__ VerdictPost post;
  __shared__ SummaryHelp help;
  const BatchTable& batch = table.batch;
  if (threadIdx.x >= kCommitThreads) {
    const LaneEntries entries(batch);
    const int64_t counter = LoadCounter(batch);
    const BatchVerdict verdict = CheckSmallBatch(batch, views.tail, slots, entries);
    post.Post(verdict, kRoles);
    if (PublishesNow(batch, verdict)) Announce(batch, views.tail, verdict, counter);
    return;
  }
  bool others = false;
  if (threadIdx.x < kRoles.rows) {
    const Plane plane = SelectPlane(table, blockIdx.x);
    WarpShare<RowOp::kCopy16, Tail, kEasy> share(batch, plane, views.tail, kRoles);
    share.Start(share.LoadFirst());
    if (post.Await(kRoles).fault != kNoFault) return;
    share.Finish();
    CopyRoots<RowOp::kCopy16>(table, views.tail, kRoles);
    if constexpr (kSummaryWarps > 0) others = help.Await(kRoles);
  } else if constexpr (kSummaryWarps > 0) {
    others = CompleteSummaries<SmallEntries, kSmallSummaryUnits>(table, views.summaries, kRoles,
                                                                 post, help);
  }
  if constexpr (kSummaryWarps > 0) {
    if (others) SummarizeOthers<kSmallSummaryUnits>(table, views.summaries, kRoles);
  }
}

// Shared memory beside the cells, at most.
template <typename Views>
inline constexpr int64_t kOwnBytes = sizeof(VerdictPost) + sizeof(SummaryHelp) +
                                     sizeof(SmallSlots) + (Views::kSummaries ? kSummaryBytes : 0);

template <typename Views>
Views MakeViews(const CommitParams& params) {
  Views views{};
  if constexpr (Views::kSummaries) views.summaries = MakeSummaryTable(params);
  if constexpr (std::is_same_v<Views, AllViews>) views.tail = MakeTailTable(params);
  return views;
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
      (shared_bytes + CurrentDeviceAttribute(cudaDevAttrReservedSharedMemoryPerBlock) +
       kOwnBytes<Views>);
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
  const Views views = MakeViews<Views>(params);
  if constexpr (Views::kSummaries) {
    const SummaryTable& summaries = views.summaries;
    if (summaries.to.kmax != nullptr) {
      const int64_t units = ExpectSummaryUnits(params.num_requests, params.depth,
                                               summaries.to.block_size, summaries.num_heads);
      const SummaryGrid chosen = ChooseSummaryGrid(space.num_planes, space.num_slices, units,
                                                   space.num_sms, space.blocks_per_sm);
      static_assert(kMaxSummaryWarps == 2);
      return Launch(chosen.warps == 1 ? SmallCommitKernel<kLayers, Views, 1, kEasy>
                                      : SmallCommitKernel<kLayers, Views, 2, kEasy>,
                    chosen.splits, kSmallCommitThreads, 0, table, views, params);
    }
  }
  if constexpr (std::is_same_v<Views, SummaryViews>) {
    NWOR_CHECK(false, "summaries: got none, expected some in a commit that was to complete them");
  } else {
    Launch(
        SmallCommitKernel<kLayers, Views, 0, kEasy>,
        ChooseCommitSplits(space.num_planes, space.num_slices, space.num_sms, space.blocks_per_sm),
        kSmallCommitThreads, 0, table, views, params);
  }
}

template <int kLayers, bool kUniform, typename Views>
void LaunchAny(const CommitTable<kLayers>& table, const CommitParams& params) {
  const auto kernel = CommitKernel<kLayers, kUniform, RowOp::kCopy16, Views>;
  const int64_t cell_bytes = int64_t{table.batch.num_cells} * 4;
  constexpr int64_t kAlwaysAllowed = 48 * 1024 - kOwnBytes<Views>;
  if (cell_bytes > kAlwaysAllowed) {
    CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(cell_bytes)),
              "commit kernel's shared memory");
  }
  const CommitSpace space = FindSpace<Views>(table.batch, params, cell_bytes);
  const Views views = MakeViews<Views>(params);
  int threads = kCommitThreads;
  if constexpr (Views::kSummaries) {
    if (views.summaries.to.kmax != nullptr) threads += kSummaryThreads;
  }
  Launch(kernel,
         ChooseCommitSplits(space.num_planes, space.num_slices, space.num_sms, space.blocks_per_sm),
         threads, cell_bytes, table, views, params);
}

template <int kLayers, typename Views>
void Launch(const CommitParams& params) {
  const CommitTable<kLayers> table = MakeCommitTable<kLayers>(params);
  const auto all = [&](auto&& is) {
    return std::all_of(table.batch.groups, table.batch.groups + params.num_groups, is);
  };
  const bool small = table.batch.num_positions <= kSmallCommitEntries &&
                     (!Views::kSummaries || params.num_requests <= 32);
  if (!all([](const GroupTable& group) { return group.op == RowOp::kCopy16; })) {
    // Built for all views or none: what it gains from less is not worth a kernel.
    LaunchAny<kLayers, /*kUniform=*/false,
              std::conditional_t<Views::kSummaries, AllViews, NoViews>>(table, params);
  } else if (!small) {
    LaunchAny<kLayers, /*kUniform=*/true, Views>(table, params);
  } else if (!all([](const GroupTable& group) { return group.easy(); })) {
    LaunchSmall<kLayers, Views, /*kEasy=*/false>(table, params);
  } else {
    // Again not worth a kernel where rows go to two places.
    LaunchSmall<kLayers, Views, !std::is_same_v<Views, AllViews>>(table, params);
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
  const CacheGeometry& geometry = params.groups[0].geometry;
  const bool summarises =
      params.summaries.kmax != nullptr && geometry.num_heads > 0 && geometry.head_dim > 0;
  const bool feeds = params.tail.keys != nullptr;
  NWOR_CHECK(params.num_groups == 1 || !(summarises || feeds), "summaries, tail: got ",
             params.num_groups, " cache groups, expected 1");
  if (feeds) {
    LaunchForLayers<kUsualViewLayers, AllViews>(params);
  } else if (summarises) {
    LaunchForLayers<kUsualViewLayers, SummaryViews>(params);
  } else {
    LaunchForLayers<kUsualLayers, NoViews>(params);
  }
}

}  // namespace nwor
