#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "kv_interceptor/commit_summaries.h"
#include "kv_interceptor/commit_table.cuh"

// Summaries of the blocks that a commit completes, by blocks of threads of their own beside those
// that move rows: tokens before the commit come from the cache, accepted ones from staging, so
// nobody waits for a row to arrive.

namespace nwor {

struct SummaryTable {
  CommitSummaries to;
  int64_t num_pages;
  uint32_t num_planes;  // blocks of threads from this one on summarise, one layer each
  int32_t num_heads;
  int32_t head_dim;
  DType row_dtype;
  DType cache_dtype;
};

struct NoSummaries {};
template <bool kSummaries>
using SummaryArgument = std::conditional_t<kSummaries, SummaryTable, NoSummaries>;

inline SummaryTable MakeSummaryTable(const CommitParams& params) {
  const CommitGroup& group = params.groups[0];
  return {params.summaries,
          group.geometry.num_pages,
          static_cast<uint32_t>(2 * params.num_layers),
          group.geometry.num_heads,
          group.geometry.head_dim,
          group.dtype,
          group.geometry.dtype};
}

__device__ inline float ReadFloat(const char* row, int channel, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return reinterpret_cast<const float*>(row)[channel];
    case DType::kFloat16:
      return __half2float(reinterpret_cast<const __half*>(row)[channel]);
    case DType::kBFloat16:
      return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(row)[channel]);
    default:
      return __half2float(__half(
          __nv_cvt_fp8_to_halfraw(reinterpret_cast<const uint8_t*>(row)[channel], __NV_E4M3)));
  }
}

__device__ inline void WriteFloat(void* base, int64_t at, DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<__half*>(base)[at] = __float2half_rn(value);
      return;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(base)[at] = __float2bfloat16_rn(value);
      return;
    default:
      static_cast<float*>(base)[at] = value;
  }
}

// One head of one block by one warp. Blocks with a page out of range are left out.
__device__ inline void SummarizeHead(const BatchTable& batch, const LayerTable& layer,
                                     int layer_idx, const SummaryTable& table, int32_t request,
                                     const CompletedBlocks& blocks, int32_t block, int32_t head) {
  const CommitSummaries& to = table.to;
  const GroupTable& group = batch.groups[0];
  const int lane = static_cast<int>(threadIdx.x % 32);
  const float scale =
      layer.scales[0] == nullptr ? 1.0f : layer.scales[0][head * layer.scale_stride[0]];
  const int32_t cached = to.cached_lens[request];
  const int64_t at = layer_idx * to.layer_stride + blocks.row * to.row_stride +
                     block * to.block_stride + head * to.head_stride;
  for (int channel = lane; channel < table.head_dim; channel += 32) {
    float high = -INFINITY, low = INFINITY;
#pragma unroll 4
    for (int32_t i = 0; i < to.block_size; ++i) {
      const int32_t token = to.start_token + block * to.block_size + i;
      float k = 0.0f;
      if (token < cached) {
        const int32_t index = token / group.pages.page_size;
        const int64_t page =
            index < to.max_pages ? to.block_table[request * to.table_stride + index] : -1;
        if (page < 0 || page >= table.num_pages) return;
        const int64_t slot = page * group.pages.page_size + token % group.pages.page_size;
        const char* row = layer.cache[0] + SlotOffset(group.cache[0], group.pages, slot) +
                          head * group.cache[0].head;
        k = ReadFloat(row, channel, table.cache_dtype) * scale;
      } else {
        const int32_t entry = batch.path[request * batch.depth + token - cached];
        const int64_t staged = StagingRow(batch, request, entry);
        const char* row = group.staged[0].data + layer.staged_layer * group.staged_layer[0] +
                          staged * group.staged[0].row + head * group.staged[0].head;
        k = ReadFloat(row, channel, table.row_dtype);
        if (table.cache_dtype != table.row_dtype) {  // as the cache will hold it
          const auto code = __nv_cvt_float_to_fp8(k / scale, __NV_SATFINITE, __NV_E4M3);
          k = __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3))) * scale;
        }
      }
      high = fmaxf(high, k);
      low = fminf(low, k);
    }
    WriteFloat(to.kmax, at + channel, to.dtype, high);
    WriteFloat(to.kmin, at + channel, to.dtype, low);
  }
}

// The share of this warp, of `num_warps` in the block of threads. REQUIRES: the batch is valid.
template <typename Layers>
__device__ void SummarizeShare(const BatchTable& batch, const Layers& layers,
                               const SummaryTable& table, int num_warps) {
  const int layer_idx = static_cast<int>(blockIdx.x - table.num_planes);
  const int32_t num_requests = batch.num_positions / batch.positions_per_request;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const auto warp = static_cast<int32_t>(blockIdx.y * num_warps + threadIdx.x / 32);
  const auto stride = static_cast<int32_t>(gridDim.y * num_warps);
#pragma unroll 1
  for (int32_t base = 0; base < num_requests; base += 32) {
    const int32_t request = base + lane;
    CompletedBlocks own;
    if (request < num_requests) own = FindCompleted(table.to, request, batch.counts[request]);
    uint32_t with_blocks = __ballot_sync(0xffffffff, own.first < own.last);
    while (with_blocks != 0) {
      const int source = __ffs(static_cast<int>(with_blocks)) - 1;
      with_blocks &= with_blocks - 1;
      CompletedBlocks blocks;
      blocks.row = __shfl_sync(0xffffffff, own.row, source);
      blocks.first = __shfl_sync(0xffffffff, own.first, source);
      blocks.last = __shfl_sync(0xffffffff, own.last, source);
      const int32_t units = (blocks.last - blocks.first) * table.num_heads;
      for (int32_t unit = warp; unit < units; unit += stride) {
        SummarizeHead(batch, layers[layer_idx], layer_idx, table, base + source, blocks,
                      blocks.first + unit / table.num_heads, unit % table.num_heads);
      }
    }
  }
}

}  // namespace nwor
