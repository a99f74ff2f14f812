#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdint>

#include "kv_interceptor/commit/summaries.h"
#include "kv_interceptor/commit/table.cuh"
#include "kv_interceptor/extremes.cuh"

// K of the blocks that a commit completes, as one warp reads it: tokens before the commit come from
// the cache, accepted ones from staging, so nobody waits for a row to arrive.

namespace nwor {

// How a warp reads a block whose channels are all of one 16-bit type: eight channels to a lane,
// several rows at once, in parts that have a lane for each token.
struct PairReading {
  uint32_t lanes_per_row = 0;  // 0: channels are not of that kind
  SmallDivisor by_lanes;
  int32_t rows_at_once = 0;
  int32_t part_tokens = 0;
  int32_t num_packets = 0;  // that a lane reads of a part
  int32_t num_parts = 0;
};

// Distances in bytes that fit 32 bits, which takes an instruction to multiply instead of five.
struct ShortStrides {
  uint32_t page, token, head;
  uint32_t staged_row, staged_head;
  uint32_t out_row, out_block, out_head;
};

struct SummaryTable {
  CommitSummaries to;
  int64_t num_pages;
  int32_t num_heads;
  SmallDivisor by_heads;
  int32_t head_dim;
  DType row_dtype;
  DType cache_dtype;
  bool in_pages;        // every block lies in one page
  int32_t block_shift;  // -1: the block size is no power of two
  PairReading pairs;
  ShortStrides strides;
  bool quick;  // a warp can read K of a block at once, pages are a power of two,
               // and strides are short
};

inline constexpr int kPartPackets = 8;  // at most

inline PairReading ChoosePairReading(int32_t head_dim, int32_t block_size) {
  const int32_t lanes = head_dim / 8, rows = 32 / lanes;
  const int32_t tokens = std::min({block_size, rows * kPartPackets, 32});
  return {static_cast<uint32_t>(lanes),
          SmallDivisor::By(static_cast<uint32_t>(lanes)),
          rows,
          tokens,
          (tokens + rows - 1) / rows,
          (block_size + tokens - 1) / tokens};
}

// False: some are too long.
inline bool MakeShortStrides(const CommitGroup& group, const CommitSummaries& to,
                             ShortStrides* strides) {
  const CacheStrides cache = MakeCacheStrides(group.geometry, 0);
  const RowsSide staged = MakeRowsSide(group.staged, 0, group.dtype);
  const int64_t bytes = ElementBytes(to.dtype);
  bool fits = true;
  const auto shorten = [&fits](int64_t stride) {
    fits = fits && stride >= 0 && stride <= UINT32_MAX;
    return static_cast<uint32_t>(stride);
  };
  *strides = {.page = shorten(cache.page),
              .token = shorten(cache.token),
              .head = shorten(cache.head),
              .staged_row = shorten(staged.row),
              .staged_head = shorten(staged.head),
              .out_row = shorten(to.row_stride * bytes),
              .out_block = shorten(to.block_stride * bytes),
              .out_head = shorten(to.head_stride * bytes)};
  return fits;
}

inline SummaryTable MakeSummaryTable(const CommitParams& params) {
  const CommitGroup& group = params.groups[0];
  CommitSummaries to = params.summaries;
  const int dim = group.geometry.head_dim;
  if (group.geometry.num_heads == 0 || dim == 0) to.kmax = nullptr;  // nothing to summarise
  Alignment alignment;
  AddRows(alignment, group.staged, dim, group.dtype);
  alignment.AddElements({group.staged_key_layer}, group.dtype);
  AddCache(alignment, group.geometry);
  for (int layer = 0; layer < params.num_layers; ++layer) alignment.Add(params.layers[layer].key);
  alignment.Add(to.kmax);
  alignment.Add(to.kmin);
  alignment.AddElements({to.layer_stride, to.row_stride, to.block_stride, to.head_stride},
                        to.dtype);
  const bool pairs = to.kmax != nullptr && group.dtype == group.geometry.dtype &&
                     group.dtype == to.dtype && ElementBytes(to.dtype) == 2 && dim % 8 == 0 &&
                     dim <= 256 && alignment.Allows(16);
  const PairReading reading = pairs ? ChoosePairReading(dim, to.block_size) : PairReading();
  ShortStrides strides{};
  const bool quick = reading.num_parts == 1 && ExactLog2(group.geometry.page_size) >= 0 &&
                     MakeShortStrides(group, to, &strides);
  return {to,
          group.geometry.num_pages,
          group.geometry.num_heads,
          SmallDivisor::By(static_cast<uint32_t>(group.geometry.num_heads)),
          dim,
          group.dtype,
          group.geometry.dtype,
          to.kmax != nullptr && group.geometry.page_size % to.block_size == 0 &&
              to.start_token % to.block_size == 0,
          ExactLog2(to.block_size),
          reading,
          strides,
          quick};
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

// Whether none of the first `count` lanes lacks its row.
__device__ inline bool AllThere(const char* row, int count) {
  return __all_sync(0xffffffff, row != nullptr || static_cast<int>(threadIdx.x % 32) >= count);
}

// K of one lane's token of a block, for all lanes to ask for. Blocks longer than a warp come in
// parts.
class LaneRows {
 public:
  __device__ LaneRows(const char* row, int count) : row_(row), count_(count) {}
  __device__ bool whole() const { return AllThere(row_, count_); }
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

// Of the rows that a warp reads at once the lane's, and where in it the lane reads.
struct PairPlace {
  int row;
  uint32_t byte;

  __device__ explicit PairPlace(const PairReading& pairs) {
    const uint32_t lane = threadIdx.x % 32, above = Divide(lane, pairs.by_lanes);
    row = static_cast<int>(above);
    byte = (lane - above * pairs.lanes_per_row) * sizeof(uint4);
  }
};

// Extremes of all rows that a warp reads at once, in the lanes of the first.
template <typename T>
__device__ void MeetRows(PairExtremes<T>& extremes, const PairReading& pairs, int row) {
  const auto lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll 1
  for (int other = 1; other < pairs.rows_at_once; ++other) {
    extremes.Meet((lane + other * static_cast<int>(pairs.lanes_per_row)) % 32, row == 0);
  }
}

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

}  // namespace nwor
