#include <algorithm>

#include "kv_interceptor/commit.h"
#include "kv_interceptor/commit_grid.h"
#include "kv_interceptor/commit_table.cuh"
#include "kv_interceptor/commit_validate.cuh"
#include "kv_interceptor/launch_check.h"

// One launch, no grid barrier. Each block takes one plane (K or V of one layer) and its share of
// the batch's rows: its warps start to load them, the block validates the whole batch meanwhile,
// and stores only when nothing is wrong anywhere.

namespace nwor {
namespace {

// K or V of one layer, and the group it belongs to.
struct Plane {
  const GroupTable& group;
  int side;
  const char* staged;
  char* cache;
  const float* scales;
  int32_t scale_stride;
};

template <int kLayers>
__device__ Plane SelectPlane(const CommitTable<kLayers>& table, int plane_idx) {
  const LayerTable& layer = table.layers[plane_idx / 2];
  const GroupTable& group = table.batch.groups[layer.group];
  const int side = plane_idx % 2;
  return {group,
          side,
          group.staged[side].data + layer.staged_layer * group.staged_layer[side],
          layer.cache[side],
          layer.scales[side],
          layer.scale_stride[side]};
}

struct BlockState {
  uint32_t fault;
  int32_t num_accepted;
  bool publishes;
};

// One slice of one accepted row in the registers of a warp. Which one follows from the unit alone,
// so a warp has its row on the way before the block has looked at the batch.
template <RowOp op>
class WarpSlice {
 public:
  __device__ void Load(const BatchTable& batch, const Plane& plane, int32_t unit,
                       int32_t num_slices) {
    const int32_t position = num_slices == 1 ? unit : unit / num_slices;
    first_ = (unit - position * num_slices) * kCommitSliceVectors + threadIdx.x % 32;
    const Entry entry = LoadEntry(batch, position);
    const bool accepted = entry.count_valid(batch) && entry.index < entry.count;
    const int32_t row = accepted ? StagingRow(batch, entry.request, entry.path_entry) : -1;
    moves_ = row >= 0;
    if (!moves_) return;
    const RowsSide& side = plane.group.staged[plane.side];
    const char* from = plane.staged + row * side.row;
    const RowShape shape = plane.group.shape;
#pragma unroll
    for (int i = 0; i < kCommitVectorsPerLane; ++i) {
      const VectorPlace place(shape, first_ + i * 32);
      if (first_ + i * 32 < shape.vectors_per_row) {
        vectors_[i].Load(from + place.Offset(side.head, VectorBytes(op).row));
      }
    }
    slot_ = DestinationSlot(plane.group, position, row);
  }

  __device__ void Store(const Plane& plane) const {
    if (!moves_) return;
    const CacheStrides& strides = plane.group.cache[plane.side];
    char* to = plane.cache + SlotOffset(strides, plane.group.pages, slot_);
    const RowShape shape = plane.group.shape;
#pragma unroll
    for (int i = 0; i < kCommitVectorsPerLane; ++i) {
      const VectorPlace place(shape, first_ + i * 32);
      if (first_ + i * 32 < shape.vectors_per_row) {
        const float scale =
            plane.scales == nullptr ? 1.0f : plane.scales[place.head * plane.scale_stride];
        vectors_[i].StoreCache(to + place.Offset(strides.head, VectorBytes(op).cache), scale);
      }
    }
  }

 private:
  RowVector<op> vectors_[kCommitVectorsPerLane];
  int64_t slot_;
  int32_t first_;
  bool moves_ = false;
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

// Tells the host and the next chunk. All threads of one block, after every block has its verdict.
__device__ __noinline__ void Publish(const BatchTable& batch, const BlockState& state) {
  const bool ok = state.fault == kNoFault;
  const int64_t num_tokens = ok ? state.num_accepted : 0;
  if (threadIdx.x == 0) {
    const CommitVerdict verdict = Describe(batch, state.fault);
    if (batch.status != nullptr) {
      batch.status[kStatusCode] = static_cast<int64_t>(verdict.error);
      batch.status[kStatusRequest] = verdict.request;
      batch.status[kStatusIndex] = verdict.index;
      batch.status[kStatusValue] = verdict.value;
      batch.status[kStatusCommitted] = num_tokens;
      for (int word = kStatusCommitted + 1; word < kNumStatusWords; ++word) batch.status[word] = 0;
    }
    if (batch.counters != nullptr) {
      auto* counters = reinterpret_cast<unsigned long long*>(batch.counters);
      atomicAdd(&counters[ok ? kCounterCommits : kCounterFailedCommits], 1ull);
      atomicAdd(&counters[kCounterCommittedTokens], static_cast<unsigned long long>(num_tokens));
      atomicAdd(&counters[kCounterCommittedBytes],
                static_cast<unsigned long long>(num_tokens * batch.bytes_per_token));
    }
  }
  if (batch.tips == nullptr || !ok) return;
  const int32_t num_requests = batch.num_positions / batch.positions_per_request;
#pragma unroll 1
  for (int32_t request = threadIdx.x; request < num_requests; request += kCommitThreads) {
    const int32_t count = batch.counts[request];
    if (count > 0) {
      const int32_t last = batch.path[request * batch.depth + count - 1];
      batch.tips[request] = StagingRow(batch, request, last);
    }
  }
}

// kUniform: every group moves its rows by `op`, which is then known here; otherwise each block
// looks its op up, and loads only after the verdict.
template <int kLayers, bool kUniform, RowOp kOp>
__global__ void __launch_bounds__(kCommitThreads, kUniform ? kCommitBlocksPerSm : 3)
    CommitKernel(const __grid_constant__ CommitTable<kLayers> table) {
  extern __shared__ uint32_t cells[];  // see InsertSlot
  __shared__ BlockState state;
  const BatchTable& batch = table.batch;
  const Entry first = LoadEntry(batch, threadIdx.x);
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < batch.num_cells; i += kCommitThreads) cells[i] = kEmptyCell;
  if (threadIdx.x == 0) state = {kNoFault, 0, false};

  const Plane plane = SelectPlane(table, blockIdx.x);
  const int32_t num_slices =
      (plane.group.shape.vectors_per_row + kCommitSliceVectors - 1) / kCommitSliceVectors;
  const int32_t num_units = batch.num_positions * num_slices;
  int32_t unit = static_cast<int32_t>(blockIdx.y + threadIdx.x / 32 * gridDim.y);
  uint32_t fault = kNoFault;
  const auto move = [&](auto op, auto&& verdict) {
    WarpSlice<decltype(op)::value> slice;
    if (unit < num_units) slice.Load(batch, plane, unit, num_slices);
    fault = verdict();
    if (fault != kNoFault) return;
    while (unit < num_units) {
      slice.Store(plane);
      unit += static_cast<int32_t>(kCommitWarps * gridDim.y);
      if (unit < num_units) slice.Load(batch, plane, unit, num_slices);
    }
  };
  // A block that has its verdict reads no input that publishing changes, so it may sign off before
  // its rows have arrived.
  const auto decide = [&] {
    __syncthreads();  // cells and state
    const uint32_t verdict = Verdict(batch, cells, first, state);
    if (batch.ticket != nullptr && threadIdx.x == kCommitThreads - 1) {
      __threadfence();
      const uint32_t last = gridDim.x * gridDim.y - 1;
      state.publishes = atomicInc(batch.ticket, last) == last;
    }
    return verdict;
  };
  if constexpr (kUniform) {
    move(std::integral_constant<RowOp, kOp>{}, decide);
  } else {
    const uint32_t verdict = decide();
    DispatchRowOp(plane.group.op, [&](auto op) { move(op, [&] { return verdict; }); });
  }

  if (batch.ticket == nullptr) {
    if (blockIdx.x == 0 && blockIdx.y == 0) Publish(batch, state);
    return;
  }
  __syncthreads();
  if (state.publishes) Publish(batch, state);
}

template <int kLayers, bool kUniform, RowOp kOp>
void Launch(const CommitTable<kLayers>& table, const CommitParams& params) {
  const int64_t shared_bytes = int64_t{table.batch.num_cells} * 4;
  const auto kernel = CommitKernel<kLayers, kUniform, kOp>;
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
  if (copies) {
    Launch<kLayers, true, RowOp::kCopy16>(table, params);
  } else {
    Launch<kLayers, false, RowOp::kCopy16>(table, params);
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
