#include <algorithm>

#include "kv_interceptor/commit.h"
#include "kv_interceptor/commit_grid.h"
#include "kv_interceptor/commit_table.cuh"
#include "kv_interceptor/commit_validate.cuh"
#include "kv_interceptor/launch_check.h"

// One launch, no grid barrier. Each block takes one plane (K or V of one layer) and its share of
// the accepted rows: it starts to load them, validates the whole batch meanwhile, and stores only
// when nothing is wrong anywhere.

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

// The accepted rows that fall to this block, in shared memory.
struct Share {
  int32_t* rows;      // staging rows
  uint16_t* entries;  // their positions in the batch
  uint32_t* cells;    // see InsertSlot
};

struct BlockState {
  uint32_t fault;
  int32_t num_rows;  // of the share
  int32_t num_accepted;
  bool publishes;
};

// Fills the share; `next` is the thread's first entry, already on its way. Requests start at
// different splits, so that shares are even whether many requests accept a little or few accept
// much. Ends with a barrier; `state` is then valid.
__device__ void CollectShare(const BatchTable& batch, Entry next, const Share& share,
                             BlockState& state) {
  const int32_t split = blockIdx.y, split_mask = gridDim.y - 1;
#pragma unroll 1
  for (int32_t i = threadIdx.x; i < batch.num_cells; i += kCommitThreads) {
    share.cells[i] = kEmptyCell;
  }
  if (threadIdx.x == 0) state = {kNoFault, 0, 0, false};
  __syncthreads();
#pragma unroll 1
  for (int32_t base = 0; base < batch.num_positions; base += kCommitThreads) {
    const Entry entry = next;
    const int32_t position = base + static_cast<int32_t>(threadIdx.x);
    next = LoadEntry(batch, position + kCommitThreads);
    int32_t row = -1;
    if (entry.count_valid(batch) && entry.index < entry.count &&
        ((entry.request + entry.index) & split_mask) == split) {
      row = StagingRow(batch, entry.request, entry.path_entry);
    }
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t have = __ballot_sync(0xffffffff, row >= 0);
    if (have == 0) continue;
    int32_t at = 0;
    if (lane == 0) at = atomicAdd(&state.num_rows, __popc(have));
    at = __shfl_sync(0xffffffff, at, 0) + __popc(have & ((1u << lane) - 1));
    if (row >= 0) {
      share.rows[at] = row;
      share.entries[at] = static_cast<uint16_t>(position);
    }
  }
  __syncthreads();
}

// One slice of one row in the registers of a warp.
template <RowOp op>
class WarpSlice {
 public:
  __device__ void Load(const Plane& plane, const Share& share, int32_t unit, int32_t num_slices) {
    const int32_t item = num_slices == 1 ? unit : unit / num_slices;
    first_ = (unit - item * num_slices) * kCommitSliceVectors + threadIdx.x % 32;
    const int32_t row = share.rows[item];
    const RowsSide& side = plane.group.staged[plane.side];
    const char* from = plane.staged + row * side.row;
    const RowShape shape = plane.group.shape;
    int64_t offsets[kCommitVectorsPerLane];
#pragma unroll
    for (int i = 0; i < kCommitVectorsPerLane; ++i) {
      offsets[i] = VectorPlace(shape, first_ + i * 32).Offset(side.head, VectorBytes(op).row);
    }
#pragma unroll
    for (int i = 0; i < kCommitVectorsPerLane; ++i) {
      if (first_ + i * 32 < shape.vectors_per_row) vectors_[i].Load(from + offsets[i]);
    }
    slot_ = DestinationSlot(plane.group, share.entries[item], row);
  }

  __device__ void Store(const Plane& plane) const {
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
};

// Ends with a barrier after which all threads know the same fault.
__device__ uint32_t Verdict(const BatchTable& batch, const Share& share, BlockState& state) {
  int32_t num_accepted = 0;
  const uint32_t fault = CheckShare(batch, share.cells, num_accepted);
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
  extern __shared__ uint32_t shared_words[];
  __shared__ BlockState state;
  const BatchTable& batch = table.batch;
  const Entry first = LoadEntry(batch, threadIdx.x);
  const CommitShared layout = ChooseCommitShared(batch.num_positions);
  const Share share{
      reinterpret_cast<int32_t*>(shared_words),
      reinterpret_cast<uint16_t*>(shared_words + layout.row_words + layout.cell_words),
      shared_words + layout.row_words};
  const Plane plane = SelectPlane(table, blockIdx.x);
  CollectShare(batch, first, share, state);

  const int32_t num_slices =
      (plane.group.shape.vectors_per_row + kCommitSliceVectors - 1) / kCommitSliceVectors;
  const int32_t num_units = state.num_rows * num_slices;
  int32_t unit = threadIdx.x / 32;
  uint32_t fault = kNoFault;
  const auto move = [&](auto op, auto&& verdict) {
    WarpSlice<decltype(op)::value> slice;
    if (unit < num_units) slice.Load(plane, share, unit, num_slices);
    fault = verdict();
    if (fault != kNoFault) return;
    while (unit < num_units) {
      slice.Store(plane);
      unit += kCommitWarps;
      if (unit < num_units) slice.Load(plane, share, unit, num_slices);
    }
  };
  // A block that has its verdict reads no input that publishing changes, so it may sign off before
  // its rows have arrived.
  const auto decide = [&] {
    const uint32_t verdict = Verdict(batch, share, state);
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
  const CommitShared shared = ChooseCommitShared(table.batch.num_positions);
  const auto kernel = CommitKernel<kLayers, kUniform, kOp>;
  constexpr int64_t kAlwaysAllowed = 48 * 1024 - sizeof(BlockState);
  if (shared.bytes() > kAlwaysAllowed) {
    CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shared.bytes())),
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
      (shared.bytes() + CurrentDeviceAttribute(cudaDevAttrReservedSharedMemoryPerBlock) +
       static_cast<int64_t>(sizeof(BlockState)));
  const int32_t splits = ChooseCommitSplits(
      num_planes, max_slices, CurrentDeviceAttribute(cudaDevAttrMultiProcessorCount),
      static_cast<int32_t>(std::clamp<int64_t>(by_memory, 1, kCommitBlocksPerSm)));
  kernel<<<dim3(num_planes, splits), kCommitThreads, shared.bytes(),
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
