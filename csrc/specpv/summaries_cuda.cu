#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "base/cuda/element.cuh"
#include "base/cuda/launch_check.h"
#include "base/row_op.h"
#include "specpv/extremes.cuh"
#include "specpv/summaries.h"

// One warp summarises one head of one block. kVector channels of a row fall to one lane, so the
// lanes form groups that read several rows at once and meet at the end.

namespace nwor {
namespace {

constexpr int kWarps = 8;
constexpr int kBlocksPerSm = 4;

// Where the rows of one head of one block lie.
struct BlockRows {
  const char* base;
  const int32_t* table;  // of the request
  int64_t first_token;
  bool in_one_page;
};

// REQUIRES: the block reaches over pages.
template <typename In>
__device__ const In* RowAt(const SummaryParams& params, const BlockRows& rows, int32_t index) {
  const CacheGeometry& cache = params.cache.geometry;
  const int64_t token = rows.first_token + index;
  const int64_t page = rows.table[token / cache.page_size];
  return reinterpret_cast<const In*>(rows.base) + page * cache.key.page +
         token % cache.page_size * cache.key.token;
}

// False when a page is out of range: such a block is left out.
template <typename In>
__device__ bool FindRows(const SummaryParams& params, int32_t request, int32_t block, int32_t head,
                         BlockRows* rows) {
  const CacheGeometry& cache = params.cache.geometry;
  rows->table = params.block_table + request * params.table_stride;
  rows->first_token = params.start_tokens[request] + int64_t{block} * params.block_size;
  const int64_t last_token = rows->first_token + params.block_size - 1;
  const int64_t first_page = rows->first_token / cache.page_size;
  const int64_t last_page = last_token / cache.page_size;
  if (rows->first_token < 0 || last_page >= params.max_pages) return false;
  for (int64_t i = first_page; i <= last_page; ++i) {
    if (rows->table[i] < 0 || rows->table[i] >= cache.num_pages) return false;
  }
  rows->in_one_page = first_page == last_page;
  const In* base = static_cast<const In*>(params.cache.key) + head * cache.key.head;
  if (rows->in_one_page) {
    base += rows->table[first_page] * cache.key.page +
            (rows->first_token - first_page * cache.page_size) * cache.key.token;
  }
  rows->base = reinterpret_cast<const char*>(base);
  return true;
}

// Takes channels from `first` on of rows `begin`, `begin` + `step` and so on in.
template <typename In, int kLoadsInFlight, typename Extremes>
__device__ void AddRows(const SummaryParams& params, const BlockRows& rows, int begin, int step,
                        int first, float scale, Extremes& extremes) {
  using Loaded = typename Extremes::Loaded;
  if (!rows.in_one_page) {
#pragma unroll 1
    for (int index = begin; index < params.block_size; index += step) {
      const In* from = RowAt<In>(params, rows, index) + first;
      extremes.Add(*reinterpret_cast<const Loaded*>(from), scale);
    }
    return;
  }
  const int64_t token = params.cache.geometry.key.token;
  const In* from = reinterpret_cast<const In*>(rows.base) + begin * token + first;
#pragma unroll 1
  for (int index = begin; index < params.block_size;) {
    Loaded packets[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      packets[i] = *reinterpret_cast<const Loaded*>(from);
      index += step;
      // The last row again instead of none: extremes do not mind.
      if (index < params.block_size) from += step * token;
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) extremes.Add(packets[i], scale);
  }
}

template <typename In, typename Out, int kVector, typename Extremes, int kLoadsInFlight>
__device__ void SummarizeBlock(const SummaryParams& params, int32_t request, int32_t block,
                               int32_t head) {
  BlockRows rows;
  if (!FindRows<In>(params, request, block, head, &rows)) return;
  const CacheGeometry& cache = params.cache.geometry;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int lanes_per_row = min(32, cache.head_dim / kVector);
  const int num_groups = 32 / lanes_per_row;
  const int group = lane / lanes_per_row;
  float scale = 1.0f;
  if (params.cache.scales.key != nullptr) {
    scale = params.cache.scales.key[params.cache.scales.key_count == 1 ? 0 : head];
  }
  int64_t row = request, at = block;
  if (params.by_pages) {
    if (!rows.in_one_page) return;
    row = rows.table[rows.first_token / cache.page_size];
    at = rows.first_token % cache.page_size / params.block_size;
  }
  Out* const kmax = static_cast<Out*>(params.kmax) + row * params.kmax_strides.request +
                    at * params.kmax_strides.block + head * params.kmax_strides.head;
  Out* const kmin = static_cast<Out*>(params.kmin) + row * params.kmin_strides.request +
                    at * params.kmin_strides.block + head * params.kmin_strides.head;
  for (int first = lane % lanes_per_row * kVector; first < cache.head_dim;
       first += lanes_per_row * kVector) {
    Extremes extremes;
    // Lanes beyond the last whole group have nothing to read but take part in the meeting.
    const int begin = group < num_groups ? group : params.block_size;
    AddRows<In, kLoadsInFlight>(params, rows, begin, num_groups, first, scale, extremes);
    for (int other = 1; other < num_groups; ++other) {
      extremes.Meet((lane + other * lanes_per_row) % 32, group == 0);
    }
    if (group == 0) extremes.Store(kmax + first, kmin + first);
  }
}

template <typename In, typename Out, int kVector, typename Extremes, int kLoadsInFlight>
__global__ void __launch_bounds__(kWarps * 32, kBlocksPerSm)
    SummarizeKernel(const __grid_constant__ SummaryParams params) {
  const auto request = static_cast<int32_t>(blockIdx.y);
  const int32_t done = params.done_blocks == nullptr ? 0 : max(0, params.done_blocks[request]);
  const int32_t blocks = min(
      params.max_blocks,
      CompleteBlocks(params.start_tokens[request], params.end_tokens[request], params.block_size));
  const int32_t heads = params.cache.geometry.num_heads;
  const int64_t num_units = int64_t{max(0, blocks - done)} * heads;
  for (int64_t unit = blockIdx.x * kWarps + threadIdx.x / 32; unit < num_units;
       unit += int64_t{gridDim.x} * kWarps) {
    SummarizeBlock<In, Out, kVector, Extremes, kLoadsInFlight>(
        params, request, done + static_cast<int32_t>(unit / heads),
        static_cast<int32_t>(unit % heads));
  }
}

template <typename In, typename Out>
auto ChooseKernel(const SummaryParams& params, bool vectors) {
  if (!vectors) return SummarizeKernel<In, Out, 1, FloatExtremes<In, Out, 1>, 4>;
  if constexpr (std::is_same_v<In, Out> && sizeof(In) == 2) {
    if (params.cache.scales.key == nullptr) {
      // As many as one lane has of a block, so that all of it is on its way at once.
      const int groups = 32 / std::min(32, params.cache.geometry.head_dim / 8);
      return params.block_size > 4 * groups ? SummarizeKernel<In, Out, 8, PairExtremes<In>, 8>
                                            : SummarizeKernel<In, Out, 8, PairExtremes<In>, 4>;
    }
  }
  return SummarizeKernel<In, Out, 8, FloatExtremes<In, Out, 8>, 4>;
}

// Whether eight channels can move at once everywhere.
bool AllowsVectors(const SummaryParams& params) {
  const CacheGeometry& cache = params.cache.geometry;
  Alignment in, out;
  in.Add(params.cache.key);
  in.AddElements({cache.key.page, cache.key.token, cache.key.head}, cache.dtype);
  out.Add(params.kmax);
  out.Add(params.kmin);
  for (const SummaryStrides& strides : {params.kmax_strides, params.kmin_strides}) {
    out.AddElements({strides.request, strides.block, strides.head}, params.dtype);
  }
  const int in_bytes = std::min(16, 8 * ElementBytes(cache.dtype));
  // A row must fall to whole lanes: with more than 32 of them, the same number to each.
  const int lanes = cache.head_dim / 8;
  return cache.head_dim % 8 == 0 && (lanes <= 32 || lanes % 32 == 0) && in.Allows(in_bytes) &&
         out.Allows(16);
}

}  // namespace

void LaunchSummarizeBlocks(const SummaryParams& params) {
  const int64_t units = int64_t{params.max_blocks} * params.cache.geometry.num_heads;
  const int sms = CurrentDeviceAttribute(cudaDevAttrMultiProcessorCount);
  const int64_t resident =
      std::max<int64_t>(1, int64_t{sms} * kBlocksPerSm * 2 / params.num_requests);
  const dim3 grid(static_cast<unsigned>(std::min((units + kWarps - 1) / kWarps, resident)),
                  static_cast<unsigned>(params.num_requests));
  const bool vectors = AllowsVectors(params);
  WithElementType(params.cache.geometry.dtype, [&](auto* in) {
    using In = std::remove_pointer_t<decltype(in)>;
    WithElementType(params.dtype, [&](auto* out) {
      using Out = std::remove_pointer_t<decltype(out)>;
      if constexpr (!std::is_same_v<Out, E4M3>) {
        const auto kernel = ChooseKernel<In, Out>(params, vectors);
        kernel<<<grid, kWarps * 32, 0, static_cast<cudaStream_t>(params.stream)>>>(params);
      }
    });
  });
  CheckCuda(cudaGetLastError(), "summaries kernel");
}

}  // namespace nwor
