#include <algorithm>

#include "kv_interceptor/commit.h"
#include "kv_interceptor/commit_grid.h"
#include "kv_interceptor/commit_move.cuh"
#include "kv_interceptor/commit_table.cuh"
#include "kv_interceptor/commit_validate.cuh"
#include "kv_interceptor/launch_check.h"

// One launch, no grid barrier. Each block takes one plane (K or V of one layer) and its share of
// the batch's rows: its warps start to load them, the block validates the whole batch meanwhile,
// and stores only when nothing is wrong anywhere.

namespace nwor {
namespace {

struct BlockState {
  uint32_t fault;
  int32_t num_accepted;
};

// Ends with a barrier after which all threads know the same fault.
__device__ uint32_t Verdict(const BatchTable& batch, uint32_t* cells, const Entry& first,
                            BlockState& state) {
  int32_t num_accepted = 0;
  const uint32_t fault = CheckShare(batch, cells, first, num_accepted);
  const uint32_t warp_fault = __reduce_min_sync(0xffffffff, fault);
  const int32_t warp_accepted = __reduce_add_sync(0xffffffff, num_accepted);
  if (threadIdx.x % 32 == 0) {
    if (warp_fault != kNoFault) atomicMin(&state.fault, warp_fault);
    if (warp_accepted != 0) atomicAdd(&state.num_accepted, warp_accepted);
  }
  __syncthreads();
  return state.fault;
}

// kUniform: every group moves its rows by `op`, which is then known here; otherwise each block
// looks its op up, and loads only after the verdict.
template <int kLayers, bool kUniform, RowOp kOp>
__global__ void __launch_bounds__(kCommitThreads, kUniform ? kCommitBlocksPerSm : 3)
    CommitKernel(const __grid_constant__ CommitTable<kLayers> table) {
  extern __shared__ uint32_t cells[];  // see InsertSlot
  __shared__ BlockState state;
  const BatchTable& batch = table.batch;
  const Plane plane = SelectPlane(table, blockIdx.x);
  FetchParameters(batch, plane);
  const Entry first = LoadEntry(batch, threadIdx.x);
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < batch.num_cells; i += kCommitThreads) cells[i] = kEmptyCell;
  if (threadIdx.x == 0) state = {kNoFault, 0};

  const int32_t num_slices =
      (plane.group.shape.vectors_per_row + kCommitSliceVectors - 1) / kCommitSliceVectors;
  const int32_t num_units = batch.num_positions * num_slices;
  int32_t unit = static_cast<int32_t>(blockIdx.y + threadIdx.x / 32 * gridDim.y);
  uint32_t fault = kNoFault;
  const auto move = [&](auto op, auto&& verdict) {
    WarpSlice<decltype(op)::value> slice;
    const auto load = [&] {
      const int32_t position = num_slices == 1 ? unit : unit / num_slices;
      const Entry entry = LoadEntry(batch, position);
      const bool accepted = entry.count_valid(batch) && entry.index < entry.count;
      const int32_t row = accepted ? StagingRow(batch, entry.request, entry.path_entry) : -1;
      const int64_t slot = row < 0 ? -1 : DestinationSlot(plane.group, position, row);
      slice.Load(plane, row, slot, unit - position * num_slices);
    };
    if (unit < num_units) load();
    fault = verdict();
    if (fault != kNoFault) return;
    while (unit < num_units) {
      slice.Store(plane);
      unit += static_cast<int32_t>(kCommitWarps * gridDim.y);
      if (unit < num_units) load();
    }
  };
  // A block that has its verdict reads no input that publishing changes, so it may sign off before
  // its rows have arrived. The last warp does it: it has the least to move, often nothing.
  const auto decide = [&] {
    __syncthreads();  // cells and state
    const uint32_t verdict = Verdict(batch, cells, first, state);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp != kCommitWarps - 1) return verdict;
    bool publishes = blockIdx.x == 0 && blockIdx.y == 0;
    if (batch.ticket != nullptr) {
      const uint32_t last = gridDim.x * gridDim.y - 1;
      if (lane == 0) {
        __threadfence();
        publishes = atomicInc(batch.ticket, last) == last;
      }
      publishes = __shfl_sync(0xffffffff, publishes, 0);
    }
    if (publishes) Publish(batch, {verdict, state.num_accepted}, lane, 32);
    return verdict;
  };
  if constexpr (kUniform) {
    move(std::integral_constant<RowOp, kOp>{}, decide);
  } else {
    const uint32_t verdict = decide();
    DispatchRowOp(plane.group.op, [&](auto op) { move(op, [&] { return verdict; }); });
  }
}

template <int kLayers>
void Launch(void (*kernel)(CommitTable<kLayers>), const CommitTable<kLayers>& table,
            const CommitParams& params, int64_t shared_bytes) {
  constexpr int64_t kAlwaysAllowed = 48 * 1024 - sizeof(BlockState);
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
       static_cast<int64_t>(sizeof(BlockState)));
  const int32_t splits = ChooseCommitSplits(
      num_planes, max_slices, CurrentDeviceAttribute(cudaDevAttrMultiProcessorCount),
      static_cast<int32_t>(std::clamp<int64_t>(by_memory, 1, kCommitBlocksPerSm)));
  kernel<<<dim3(num_planes, splits), kCommitThreads, shared_bytes,
           static_cast<cudaStream_t>(params.stream)>>>(table);
  CheckCuda(cudaGetLastError(), "commit kernel");
}

template <int kLayers>
void Launch(const CommitParams& params) {
  const CommitTable<kLayers> table = MakeCommitTable<kLayers>(params);
  const bool copies = std::all_of(table.batch.groups, table.batch.groups + params.num_groups,
                                  [](const auto& group) { return group.op == RowOp::kCopy16; });
  const int64_t cell_bytes = int64_t{table.batch.num_cells} * 4;
  if (copies) {
    Launch<kLayers>(CommitKernel<kLayers, true, RowOp::kCopy16>, table, params, cell_bytes);
  } else {
    Launch<kLayers>(CommitKernel<kLayers, false, RowOp::kCopy16>, table, params, cell_bytes);
  }
}

}  // namespace

void LaunchCommit(const CommitParams& params) {
  CheckCommitParams(params);
  NWOR_CHECK(params.ticket != nullptr || !PublishesLast(params),
             "ticket: got null, expected a zeroed word because tips are updated or status and "
             "round_status are one");
  if (params.num_layers <= kUsualLayers) {
    Launch<kUsualLayers>(params);
  } else {
    Launch<kMaxCommitLayers>(params);
  }
}

}  // namespace nwor
