#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "base/cuda/dependent_launch.cuh"
#include "base/cuda/element.cuh"
#include "base/cuda/launch_check.h"
#include "base/row_op.h"
#include "specpv/retrieval.h"
#include "specpv/score_tensor.cuh"
#include "specpv/selection.h"

namespace nwor {
namespace {

constexpr int kPlainWarps = 8;
constexpr int kMaxResidentScores = 4;  // thread blocks of the tensor kernel on an SM

// Any dtypes, any number of channels: one warp per block, channels over the lanes, rows in turn.
template <typename Q, typename T>
__global__ void __launch_bounds__(kPlainWarps * 32)
    PlainScoreKernel(const __grid_constant__ SelectParams params) {
  WaitOnDependentGrids();
  LaunchDependentGrids();
  const auto kv_head = static_cast<int32_t>(blockIdx.y % params.num_kv_heads);
  const auto request = static_cast<int32_t>(blockIdx.y / params.num_kv_heads);
  const int32_t candidates = min(params.num_candidates[request], params.max_blocks);
  const auto block = static_cast<int32_t>(blockIdx.x * kPlainWarps + threadIdx.x / 32);
  if (block >= candidates) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int group = params.num_heads / params.num_kv_heads;
  const bool by_pages = params.pages.block_table != nullptr;
  const int64_t row = by_pages ? 0 : request;
  const int64_t at = by_pages ? max(0, BlockInPages(params.pages, request, block)) : block;
  const T* high = static_cast<const T*>(params.kmax) + row * params.kmax_strides.request +
                  at * params.kmax_strides.block + kv_head * params.kmax_strides.head;
  const T* low = static_cast<const T*>(params.kmin) + row * params.kmin_strides.request +
                 at * params.kmin_strides.block + kv_head * params.kmin_strides.head;
  const QueryRange range = QueriesOf(params, request);
  const bool quest = params.score == Score::kQuest;
  float total = 0.0f;
  for (int head = 0; head < group; ++head) {
    float score = 0.0f;
    for (int query = range.begin; query < range.end; ++query) {
      const Q* channels = static_cast<const Q*>(params.query) + request * params.query_request +
                          query * params.query_row +
                          (int64_t{kv_head} * group + head) * params.query_head;
      float upper = 0.0f, lower = 0.0f;
      for (int c = lane; c < params.head_dim; c += 32) {
        const float q = ElementToFloat(channels[c]);
        upper += (quest ? fmaxf(q, 0.0f) : q) * ElementToFloat(high[c]);
        lower += (quest ? fminf(q, 0.0f) : q) * ElementToFloat(low[c]);
      }
#pragma unroll
      for (int mask = 16; mask > 0; mask /= 2) {
        upper += __shfl_xor_sync(0xffffffff, upper, mask);
        lower += __shfl_xor_sync(0xffffffff, lower, mask);
      }
      const float s = quest ? upper + lower : fmaxf(upper, lower);
      const bool is_first = query == range.begin;
      score = is_first ? s : params.query_reduce == QueryReduce::kMax ? fmaxf(score, s) : score + s;
    }
    total = head == 0                                  ? score
            : params.group_reduce == GroupReduce::kMax ? fmaxf(total, score)
                                                       : total + score;
  }
  if (lane == 0) {
    params.scores[(int64_t{request} * params.num_kv_heads + kv_head) * params.max_blocks + block] =
        total;
  }
}

// How the tensor kernel is laid out over thread blocks and shared memory.
struct TensorGrid {
  int warps = 0;  // of a thread block
  int query_room = 0;
  int64_t shared_bytes = 0;
  int ctas = 0;  // of one KV head, for all requests together
};

// Whether the sum of a KV head's scores is that of one row: see TensorScore::SumQueries. Three
// numbers of 8 bits make a float only where they have its exponents.
bool ScoresBySums(const SelectParams& params) {
  return params.score == Score::kQuest && params.dtype == DType::kBFloat16 &&
         params.query_reduce != QueryReduce::kMax && params.group_reduce == GroupReduce::kMean;
}

// Rows of a head that count in one request at most. With ranges the queries of all requests may lie
// in one tensor, and only the caller knows how few of them are one's.
int64_t MostQueries(const SelectParams& params) {
  if (params.query_reduce == QueryReduce::kLast) return 1;
  if (params.query_rows == nullptr || params.max_rows <= 0) return params.num_queries;
  return std::min(params.max_rows, params.num_queries);
}

TensorGrid ChooseTensorGrid(const SelectParams& params) {
  const int64_t limit = CurrentDeviceAttribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int64_t of_sm = CurrentDeviceAttribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const int64_t reserved = CurrentDeviceAttribute(cudaDevAttrReservedSharedMemoryPerBlock);
  const int64_t row_bytes = int64_t{params.head_dim} * 2;
  const int64_t query_bytes =
      params.num_heads / params.num_kv_heads * (row_bytes + kQueryPadBytes);  // one of every head
  const int64_t sum_bytes = ScoresBySums(params) ? kSumRows * (row_bytes + kQueryPadBytes) : 0;
  const int64_t ring_bytes = kTensorStages * 2 * kTensorBlocks * row_bytes;
  int64_t room = (MostQueries(params) + kTensorQueries - 1) / kTensorQueries * kTensorQueries;
  const auto bytes = [&](int warps) { return room * query_bytes + sum_bytes + warps * ring_bytes; };
  TensorGrid grid;
  // Small thread blocks start and end smoothly; queries that fill half of an SM's memory are better
  // shared by more warps.
  if (2 * (bytes(4) + reserved) <= of_sm) {
    grid.warps = 4;
  } else if (bytes(kMaxTensorWarps) <= limit) {
    grid.warps = kMaxTensorWarps;
  } else {
    grid.warps = 4;
    while (grid.warps > 1 && sum_bytes + grid.warps * ring_bytes > limit) grid.warps /= 2;
    const int64_t fitting = (limit - sum_bytes - grid.warps * ring_bytes) / query_bytes;
    room = std::min(room, fitting / kTensorQueries * kTensorQueries);
  }
  grid.query_room = static_cast<int>(room);
  grid.shared_bytes = bytes(grid.warps);
  const int64_t resident =
      std::clamp<int64_t>(of_sm / (grid.shared_bytes + reserved), 1, kMaxResidentScores);
  const int64_t slots = CurrentDeviceAttribute(cudaDevAttrMultiProcessorCount) * resident;
  const int64_t units = (params.max_blocks + kTensorBlocks - 1) / kTensorBlocks;
  // The device is filled once, whoever refreshes: thread blocks are shared out on the device.
  const int64_t useful = params.num_requests * ((units + grid.warps - 1) / grid.warps);
  grid.ctas = static_cast<int>(
      std::max<int64_t>(std::min(slots / params.num_kv_heads, useful), params.num_requests));
  return grid;
}

bool AllowsTensorCores(const SelectParams& params) {
  Alignment alignment;
  alignment.Add(params.query);
  alignment.Add(params.kmax);
  alignment.Add(params.kmin);
  alignment.AddElements({params.query_request, params.query_row, params.query_head}, params.dtype);
  for (const SummaryStrides& strides : {params.kmax_strides, params.kmin_strides}) {
    alignment.AddElements({strides.request, strides.block, strides.head}, params.dtype);
  }
  const int dim = params.head_dim;
  return params.dtype == params.query_dtype && params.dtype != DType::kFloat32 &&
         (dim == 64 || dim == 96 || dim == 128 || dim == 192 || dim == 256) && alignment.Allows(16);
}

template <typename T, int kChunks>
void LaunchTensorScore(const SelectParams& params, const TensorGrid& grid) {
  constexpr bool kMayHaveSums = std::is_same_v<T, __nv_bfloat16>;
  const auto kernel = params.score != Score::kQuest ? TensorScoreKernel<T, kChunks, false, false>
                      : ScoresBySums(params) ? TensorScoreKernel<T, kChunks, true, kMayHaveSums>
                                             : TensorScoreKernel<T, kChunks, true, false>;
  CheckCuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(grid.shared_bytes)),
            "score kernel's shared memory");
  const dim3 ctas(static_cast<unsigned>(grid.ctas * params.num_kv_heads));
  LaunchDependent(kernel, ctas, grid.warps * 32, static_cast<size_t>(grid.shared_bytes),
                  TensorScoreParams{params, grid.query_room}, "score kernel");
}

template <typename T>
void LaunchTensorScore(const SelectParams& params, const TensorGrid& grid) {
  switch (params.head_dim / kTensorChannels) {
    case 2:
      return LaunchTensorScore<T, 2>(params, grid);
    case 3:
      return LaunchTensorScore<T, 3>(params, grid);
    case 4:
      return LaunchTensorScore<T, 4>(params, grid);
    case 6:
      return LaunchTensorScore<T, 6>(params, grid);
    default:
      return LaunchTensorScore<T, 8>(params, grid);
  }
}

void LaunchPlainScore(const SelectParams& params) {
  const dim3 grid(static_cast<unsigned>((params.max_blocks + kPlainWarps - 1) / kPlainWarps),
                  static_cast<unsigned>(params.num_requests * params.num_kv_heads));
  WithElementType(params.query_dtype, [&](auto* query) {
    using Q = std::remove_pointer_t<decltype(query)>;
    WithElementType(params.dtype, [&](auto* summary) {
      using T = std::remove_pointer_t<decltype(summary)>;
      if constexpr (!std::is_same_v<Q, E4M3> && !std::is_same_v<T, E4M3>) {
        LaunchDependent(PlainScoreKernel<Q, T>, grid, kPlainWarps * 32, 0, params, "score kernel");
      }
    });
  });
}

}  // namespace

void LaunchSelectBlocks(const SelectParams& params) {
  if (params.max_blocks > 0) {
    if (!AllowsTensorCores(params)) {
      LaunchPlainScore(params);
    } else if (params.dtype == DType::kFloat16) {
      LaunchTensorScore<__half>(params, ChooseTensorGrid(params));
    } else {
      LaunchTensorScore<__nv_bfloat16>(params, ChooseTensorGrid(params));
    }
  }
  LaunchTakeHighest(params);
}

}  // namespace nwor
