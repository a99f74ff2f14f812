#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "attention/merge/merge_rows_params.h"
#include "base/cuda/dependent_launch.cuh"
#include "kv_interceptor/stage/stage_row.cuh"

namespace nwor {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsAtOnce = 8;  // in-flight rows whose K and V are loaded together
constexpr int kChannels = 8;    // of one head that a lane holds: 16 bytes
constexpr uint32_t kAll = 0xffffffff;

__device__ float2 ToFloats(__half2 pair) { return __half22float2(pair); }
__device__ float2 ToFloats(__nv_bfloat162 pair) { return __bfloat1622float2(pair); }
__device__ void Put(__half2* to, float2 x) { *to = __float22half2_rn(x); }
__device__ void Put(__nv_bfloat162* to, float2 x) { *to = __float22bfloat162_rn(x); }

// A lane's channels of one row and head, as stored.
template <typename Pair>
struct Packed {
  uint4 words;

  __device__ void Load(const void* base, int64_t element) {
    words = *reinterpret_cast<const uint4*>(static_cast<const Pair*>(base) + element / 2);
  }
  __device__ float2 pair(int i) const { return ToFloats(reinterpret_cast<const Pair*>(&words)[i]); }
};

// The sum over the lanes of one head.
template <int kLanes>
__device__ float HeadSum(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

// The maximum over them.
template <int kLanes>
__device__ float HeadMax(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

template <typename Pair>
__device__ float Dot(const Packed<Pair>& a, const Packed<Pair>& b) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) {
    const float2 x = a.pair(i), y = b.pair(i);
    sum += x.x * y.x + x.y * y.y;
  }
  return sum;
}

// The request of a row; B if it belongs to none. Called by a whole warp.
__device__ int32_t RequestOf(const MergeRowsParams& params, int32_t row, int lane) {
  int32_t request = 0;
  while (request < params.num_requests) {
    const int32_t b = request + lane;
    const bool ended = b < params.num_requests && params.query_start[b + 1] <= row;
    const int32_t count = __popc(__ballot_sync(kAll, ended));
    request += count;
    if (count < 32) break;
  }
  return request;
}

// A running softmax over one head: weights relative to `max`.
template <typename Pair>
struct State {
  float2 out[kChannels / 2] = {};
  float max = -INFINITY;
  float sum = 0.0f;

  __device__ void Scale(float by) {
#pragma unroll
    for (float2& pair : out) pair = make_float2(pair.x * by, pair.y * by);
  }
  // REQUIRES: score above -infinity.
  __device__ void Rebase(float score) {
    const float higher = fmaxf(max, score);
    const float by = max == -INFINITY ? 0.0f : expf(max - higher);
    Scale(by);
    sum *= by;
    max = higher;
  }
  __device__ void Add(float weight, const Packed<Pair>& value) {
    sum += weight;
#pragma unroll
    for (int i = 0; i < kChannels / 2; ++i) {
      const float2 pair = value.pair(i);
      out[i].x += weight * pair.x;
      out[i].y += weight * pair.y;
    }
  }
};

// Which of the `count` rows from the request's row `first` on are visible, one bit each.
static_assert(64 % kRowsAtOnce == 0);
__device__ uint32_t Visible(const MergeRowsParams& params, int32_t row, int32_t first,
                            int32_t count) {
  const uint32_t all = (1u << min(count, kRowsAtOnce)) - 1;
  if (params.tree_mask == nullptr) return all;
  if (first / 64 >= params.mask_words) return 0;
  const uint64_t word = params.tree_mask[int64_t{row} * params.mask_words + first / 64];
  return static_cast<uint32_t>(word >> (first % 64)) & all;
}

// One warp: 32 / kLanes query heads of one row, from `first_head` on.
template <typename Pair, int kLanes>
__device__ void MergeRow(const MergeRowsParams& params, int32_t row, int32_t first_head) {
  const int lane = threadIdx.x % 32;
  const int32_t own = first_head + lane / kLanes;
  const int32_t channel = lane % kLanes * kChannels;
  const bool stores = own < params.num_heads && channel < params.head_dim;
  // Lanes without a head repeat their neighbour's, so that all lanes take part in the sums.
  const int32_t head = min(own, params.num_heads - 1);
  const bool holds = channel < params.head_dim;
  const int32_t kv_head = head / (params.num_heads / params.num_kv_heads);
  const auto place = [&](const RowStrides& strides, int32_t of_row, int32_t of_head) {
    return of_row * strides.row + of_head * strides.head + channel;
  };
  Packed<Pair> query{}, prefix{};
  if (holds) query.Load(params.query, place(params.query_strides, row, head));
  int32_t begin = row, end = row + 1;
  if (params.rows_per_request > 0) {
    begin -= row % params.rows_per_request;
  } else {
    const int32_t request = RequestOf(params, row, lane);
    if (request >= params.num_requests || row < params.query_start[request]) return;
    if (params.token_lens != nullptr) {
      begin = request * params.token_room;
      end = begin + min(params.token_lens[request], params.token_room);
    } else {
      // Starts are device data and may be wrong: only rows that exist are read.
      begin = max(params.query_start[request], 0);
      if (params.tree_mask != nullptr) end = min(params.query_start[request + 1], params.num_rows);
    }
  }

  State<Pair> state;
#pragma unroll 1
  for (int32_t first = begin; first < end; first += kRowsAtOnce) {
    Packed<Pair> keys[kRowsAtOnce] = {}, values[kRowsAtOnce] = {};
    const uint32_t visible = Visible(params, row, first - begin, end - first);  // of all lanes
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
      // Rows that are not visible are not read: they may hold anything.
      if (!(visible >> j & 1) || !holds) continue;
      keys[j].Load(params.key, place(params.key_strides, first + j, kv_head));
      values[j].Load(params.value, place(params.value_strides, first + j, kv_head));
    }
    // Lane j of a head keeps row j's score, so that the code below exists once and not once per
    // row: after attention has filled the caches, instructions are fetched from memory.
    float score = -INFINITY;
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
      if (!(visible >> j & 1)) continue;
      const float sum = HeadSum<kLanes>(Dot(query, keys[j])) * params.scale;
      if (lane % kLanes == j) score = sum;
    }
    const bool keeps = lane % kLanes < kRowsAtOnce && (visible >> (lane % kLanes) & 1);
    if (params.softcap > 0.0f && keeps) score = params.softcap * tanhf(score / params.softcap);
    const float highest = HeadMax<kLanes>(score);
    if (highest > -INFINITY) state.Rebase(highest);
    const float weight = expf(score - (state.max == -INFINITY ? 0.0f : state.max));
#pragma unroll
    for (int j = 0; j < kRowsAtOnce; ++j) {
      if (visible >> j & 1) state.Add(__shfl_sync(kAll, weight, j, kLanes), values[j]);
    }
  }
  if (params.rows_ready) WaitOnDependentGrids();
  const float prefix_lse =
      params
          .prefix_lse[row * params.prefix_lse_strides.row + head * params.prefix_lse_strides.head];
  if (holds) prefix.Load(params.prefix_out, place(params.prefix_strides, row, head));
  if (!isinf(prefix_lse)) {
    state.Rebase(prefix_lse);
    state.Add(expf(prefix_lse - state.max), prefix);
  }
  const bool nothing = state.sum == 0.0f;
  state.Scale(nothing ? 0.0f : 1.0f / state.sum);
  if (!stores) return;
  Packed<Pair> result;
#pragma unroll
  for (int i = 0; i < kChannels / 2; ++i) {
    Put(reinterpret_cast<Pair*>(&result.words) + i, state.out[i]);
  }
  *reinterpret_cast<uint4*>(static_cast<Pair*>(params.out) +
                            place(params.out_strides, row, head) / 2) = result.words;
  if (params.lse != nullptr && channel == 0) {
    params.lse[int64_t{row} * params.num_heads + head] =
        nothing ? -INFINITY : state.max + logf(state.sum);
  }
}

template <int kLanes>
__host__ __device__ int32_t WarpsPerRow(const MergeRowsParams& params) {
  constexpr int32_t kHeads = 32 / kLanes;
  return (params.num_heads + kHeads - 1) / kHeads;
}

// How thread blocks grid the layer's write; zeros if there is none.
struct WriteGrid {
  StageTable table;
  int32_t num_blocks;
  int32_t threads_per_row;
  int32_t rows_per_block;
};

struct MergeAndWriteParams {
  MergeRowsParams rows;
  WriteGrid write;
  StreamHandle stream;
};

// The first write.num_blocks thread blocks write, alternating K and V. The others merge: one warp
// has some query heads of a row. Neither waits for the other.
template <typename Pair, int kLanes, bool kWrites>
__device__ void RunBlock(const MergeRowsParams& params, const WriteGrid& write) {
  if constexpr (kWrites) {
    if (static_cast<int32_t>(blockIdx.x) < write.num_blocks) {
      const int32_t within = threadIdx.x / write.threads_per_row;
      const int32_t row = static_cast<int32_t>(blockIdx.x / 2) * write.rows_per_block + within;
      if (within >= write.rows_per_block || row >= write.table.num_rows) return;
      StageRow<RowOp::kCopy16>(write.table, row, blockIdx.x % 2,
                               threadIdx.x % write.threads_per_row, write.threads_per_row);
      return;
    }
  }
  const int32_t block = static_cast<int32_t>(blockIdx.x) - (kWrites ? write.num_blocks : 0);
  const int32_t warp = block * kWarps + static_cast<int32_t>(threadIdx.x / 32);
  const int32_t warps_per_row = WarpsPerRow<kLanes>(params);
  const int32_t row = warp / warps_per_row;
  if (row >= params.num_rows) return;
  MergeRow<Pair, kLanes>(params, row, (warp - row * warps_per_row) * (32 / kLanes));
}

template <typename Pair, int kLanes, bool kWrites>
__global__ void __launch_bounds__(kThreads)
    MergeRowsKernel(const __grid_constant__ MergeAndWriteParams table) {
  if (!table.rows.rows_ready) WaitOnDependentGrids();
  RunBlock<Pair, kLanes, kWrites>(table.rows, table.write);
  WaitOnDependentGrids();
}

WriteGrid GridOfWrite(const StageParams& params) {
  WriteGrid grid{};
  grid.table = MakeStageTable(params, RowOp::kCopy16);
  grid.threads_per_row = std::min(grid.table.shape.vectors_per_row, kThreads);
  grid.rows_per_block = kThreads / grid.threads_per_row;
  grid.num_blocks = 2 * ((params.num_rows + grid.rows_per_block - 1) / grid.rows_per_block);
  return grid;
}

template <typename Pair, int kLanes>
void Launch(const MergeRowsParams& params, const WriteGrid& write) {
  const int64_t warps = int64_t{params.num_rows} * WarpsPerRow<kLanes>(params);
  const auto blocks = static_cast<unsigned>((warps + kWarps - 1) / kWarps + write.num_blocks);
  if (blocks == 0) return;
  const auto kernel = write.num_blocks > 0 ? MergeRowsKernel<Pair, kLanes, true>
                                           : MergeRowsKernel<Pair, kLanes, false>;
  const MergeAndWriteParams table{params, write, params.stream};
  if (params.ordered) {
    kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(params.stream)>>>(table);
    return CheckCuda(cudaGetLastError(), "merge_rows kernel");
  }
  LaunchDependent(kernel, dim3(blocks), kThreads, 0, table, "merge_rows kernel");
}

template <typename Pair>
void LaunchFor(const MergeRowsParams& params, const WriteGrid& write) {
  if (params.head_dim <= 8 * kChannels) return Launch<Pair, 8>(params, write);
  if (params.head_dim <= 16 * kChannels) return Launch<Pair, 16>(params, write);
  return Launch<Pair, 32>(params, write);
}

}  // namespace

void LaunchMergeAndWriteRows(const MergeRowsParams& params, const StageParams* write) {
  WriteGrid grid{};
  if (write != nullptr && write->num_rows > 0) {
    // A write that is not a plain 16-byte copy has its own launch.
    if (write->cache.geometry.dtype == write->dtype && ChooseStageOp(*write) == RowOp::kCopy16) {
      grid = GridOfWrite(*write);
    } else {
      StageParams separate = *write;
      separate.stream = params.stream;
      LaunchStage(separate);
    }
  }
  if (params.dtype == DType::kFloat16) return LaunchFor<__half2>(params, grid);
  return LaunchFor<__nv_bfloat162>(params, grid);
}

}  // namespace nwor
