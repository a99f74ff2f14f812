#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "kv_interceptor/commit_summaries.h"
#include "kv_interceptor/commit_table.cuh"
#include "kv_interceptor/extremes.cuh"

// Summaries of the blocks that a commit completes, by the warps that have moved its rows: tokens
// before the commit come from the cache, accepted ones from staging, so nobody waits for a row to
// arrive.

namespace nwor {

struct SummaryTable {
  CommitSummaries to;
  int64_t num_pages;
  int32_t num_heads;
  int32_t head_dim;
  DType row_dtype;
  DType cache_dtype;
  bool pairs;  // all of one 16-bit type, eight channels at a time
};

inline SummaryTable MakeSummaryTable(const CommitParams& params) {
  const CommitGroup& group = params.groups[0];
  const CommitSummaries& to = params.summaries;
  const int dim = group.geometry.head_dim;
  Alignment alignment;
  AddRows(alignment, group.staged, dim, group.dtype);
  alignment.AddElements({group.staged_key_layer}, group.dtype);
  AddCache(alignment, group.geometry);
  for (int layer = 0; layer < params.num_layers; ++layer) alignment.Add(params.layers[layer].key);
  alignment.Add(to.kmax);
  alignment.Add(to.kmin);
  alignment.AddElements({to.layer_stride, to.row_stride, to.block_stride, to.head_stride},
                        to.dtype);
  const bool pairs = group.dtype == group.geometry.dtype && group.dtype == to.dtype &&
                     ElementBytes(to.dtype) == 2 && dim % 8 == 0 && dim <= 256 &&
                     alignment.Allows(16);
  return {to,
          group.geometry.num_pages,
          group.geometry.num_heads,
          dim,
          group.dtype,
          group.geometry.dtype,
          pairs};
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

// Where K of one token of a request lies, in the cache or in staging; null when a page is out of
// range.
__device__ inline const char* KeyRow(const BatchTable& batch, const LayerTable& layer,
                                     const SummaryTable& table, int32_t request, int32_t token,
                                     int32_t head) {
  const CommitSummaries& to = table.to;
  const GroupTable& group = batch.groups[0];
  const int32_t cached = to.cached_lens[request];
  if (token < cached) {
    const int32_t index = token / group.pages.page_size;
    const int64_t page =
        index < to.max_pages ? to.block_table[request * to.table_stride + index] : -1;
    if (page < 0 || page >= table.num_pages) return nullptr;
    return layer.cache[0] + page * group.cache[0].page +
           (token - index * group.pages.page_size) * group.cache[0].token +
           head * group.cache[0].head;
  }
  const int32_t entry = batch.path[request * batch.depth + token - cached];
  const int64_t staged = StagingRow(batch, request, entry);
  return group.staged[0].data + layer.staged_layer * group.staged_layer[0] +
         staged * group.staged[0].row + head * group.staged[0].head;
}

// K of one lane's token of a block, for all lanes to ask for; see KeyRow. Blocks longer than a warp
// come in parts.
class LaneRows {
 public:
  __device__ LaneRows(const char* row, int count) : row_(row), count_(count) {}
  __device__ bool whole() const {
    const bool missing = threadIdx.x % 32 < static_cast<unsigned>(count_) && row_ == nullptr;
    return __ballot_sync(0xffffffff, missing) == 0;
  }
  __device__ int count() const { return count_; }
  // The row of token `index`, which may differ from lane to lane. All lanes call it.
  __device__ const char* At(int index) const {
    const auto bits = reinterpret_cast<unsigned long long>(row_);
    return reinterpret_cast<const char*>(__shfl_sync(0xffffffff, bits, index));
  }

 private:
  const char* row_;
  int count_;
};

// Channels of any type, one to a lane, rows in turn. `cached`: tokens of the part that come from
// the cache.
__device__ inline void AddPlainRows(const LaneRows& rows, const SummaryTable& table, int cached,
                                    float scale, int channel, float* high, float* low) {
#pragma unroll 4
  for (int i = 0; i < rows.count(); ++i) {
    const char* row = rows.At(i);
    if (channel >= table.head_dim) continue;
    float k = 0.0f;
    if (i < cached) {
      k = ReadFloat(row, channel, table.cache_dtype) * scale;
    } else {
      k = ReadFloat(row, channel, table.row_dtype);
      if (table.cache_dtype != table.row_dtype) {  // as the cache will hold it
        k = Dequantize(__nv_cvt_float_to_fp8(k / scale, __NV_SATFINITE, __NV_E4M3), scale);
      }
    }
    *high = fmaxf(*high, k);
    *low = fminf(*low, k);
  }
}

// Eight channels of 16 bits to a lane, as many rows at once as there are groups of lanes.
template <typename T>
__device__ void AddPairRows(const LaneRows& rows, int lanes_per_row, PairExtremes<T>& extremes) {
  constexpr int kLoadsInFlight = 8;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int num_groups = 32 / lanes_per_row;
  const int group = lane / lanes_per_row;
#pragma unroll 1
  for (int first = 0; first < rows.count(); first += num_groups * kLoadsInFlight) {
    typename PairExtremes<T>::Loaded packets[kLoadsInFlight];
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      // The last row again instead of none: extremes do not mind.
      const int index = min(first + i * num_groups + group, rows.count() - 1);
      const char* row = rows.At(index) + lane % lanes_per_row * sizeof(packets[0]);
      packets[i] = *reinterpret_cast<const typename PairExtremes<T>::Loaded*>(row);
    }
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) extremes.Add(packets[i], 1.0f);
  }
}

// One head of one block by one warp. Blocks with a page out of range are left out.
struct HeadBlock {
  const BatchTable& batch;
  const LayerTable& layer;
  const SummaryTable& table;
  int layer_idx;
  int32_t request;
  int32_t row;
  int32_t block;
  int32_t head;

  __device__ int64_t OutAt() const {
    const CommitSummaries& to = table.to;
    return layer_idx * to.layer_stride + row * to.row_stride + block * to.block_stride +
           head * to.head_stride;
  }
  __device__ int32_t FirstToken() const {
    return table.to.start_token + block * table.to.block_size;
  }
  // Tokens `first` to first + 31 of the block, as far as it goes.
  __device__ LaneRows Find(int first) const {
    const int count = min(32, table.to.block_size - first);
    const int lane = static_cast<int>(threadIdx.x % 32);
    const char* found = nullptr;
    if (lane < count) {
      found = KeyRow(batch, layer, table, request, FirstToken() + first + lane, head);
    }
    return {found, count};
  }

  template <typename T>
  __device__ void SummarizePairs() const {
    const int lanes_per_row = table.head_dim / 8;
    const int lane = static_cast<int>(threadIdx.x % 32);
    PairExtremes<T> extremes;
#pragma unroll 1
    for (int first = 0; first < table.to.block_size; first += 32) {
      const LaneRows rows = Find(first);
      if (!rows.whole()) return;
      AddPairRows<T>(rows, lanes_per_row, extremes);
    }
    for (int other = 1; other < 32 / lanes_per_row; ++other) {
      extremes.Meet((lane + other * lanes_per_row) % 32, lane < lanes_per_row);
    }
    if (lane < lanes_per_row) {
      const int64_t at = OutAt() + lane * 8;
      extremes.Store(static_cast<T*>(table.to.kmax) + at, static_cast<T*>(table.to.kmin) + at);
    }
  }

  __device__ void SummarizePlain() const {
    const float scale =
        layer.scales[0] == nullptr ? 1.0f : layer.scales[0][head * layer.scale_stride[0]];
    const int32_t cached = table.to.cached_lens[request] - FirstToken();
#pragma unroll 1
    for (int base = 0; base < table.head_dim; base += 32) {
      const int channel = base + static_cast<int>(threadIdx.x % 32);
      float high = -INFINITY, low = INFINITY;
#pragma unroll 1
      for (int first = 0; first < table.to.block_size; first += 32) {
        const LaneRows rows = Find(first);
        if (!rows.whole()) return;
        AddPlainRows(rows, table, cached - first, scale, channel, &high, &low);
      }
      if (channel < table.head_dim) {
        WriteFloat(table.to.kmax, OutAt() + channel, table.to.dtype, high);
        WriteFloat(table.to.kmin, OutAt() + channel, table.to.dtype, low);
      }
    }
  }

  __device__ void Summarize() const {
    if (!table.pairs) return SummarizePlain();
    table.row_dtype == DType::kFloat16 ? SummarizePairs<__half>() : SummarizePairs<__nv_bfloat16>();
  }
};

// The completed blocks of one layer, dealt to `num_warps` warps. REQUIRES: the batch is valid.
__device__ __noinline__ void SummarizeShare(const BatchTable& batch, const LayerTable& layer,
                                            int layer_idx, const SummaryTable& table, int32_t warp,
                                            int32_t num_warps) {
  if (table.to.kmax == nullptr) return;
  const int32_t num_requests = batch.num_positions / batch.positions_per_request;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll 1
  for (int32_t base = 0; base < num_requests; base += 32) {
    const int32_t request = base + lane;
    CompletedBlocks own;
    if (request < num_requests) own = FindCompleted(table.to, request, batch.counts[request]);
    uint32_t with_blocks = __ballot_sync(0xffffffff, own.first < own.last);
    int32_t skipped = 0;  // units of requests before, so that short ones do not all meet one warp
    while (with_blocks != 0) {
      const int source = __ffs(static_cast<int>(with_blocks)) - 1;
      with_blocks &= with_blocks - 1;
      const int32_t row = __shfl_sync(0xffffffff, own.row, source);
      const int32_t first = __shfl_sync(0xffffffff, own.first, source);
      const int32_t last = __shfl_sync(0xffffffff, own.last, source);
      const int32_t units = (last - first) * table.num_heads;
      const int32_t begin = (warp + num_warps - skipped % num_warps) % num_warps;
      for (int32_t unit = begin; unit < units; unit += num_warps) {
        HeadBlock{batch,
                  layer,
                  table,
                  layer_idx,
                  base + source,
                  row,
                  first + unit / table.num_heads,
                  unit % table.num_heads}
            .Summarize();
      }
      skipped += units;
    }
  }
}

}  // namespace nwor
