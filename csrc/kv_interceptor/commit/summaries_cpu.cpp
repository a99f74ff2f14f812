#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstddef>
#include <limits>

#include "base/fp8.h"
#include "kv_interceptor/commit/commit.h"

namespace nwor {
namespace {

float ReadChannel(const std::byte* row, int channel, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return reinterpret_cast<const float*>(row)[channel];
    case DType::kFloat16:
      return reinterpret_cast<const c10::Half*>(row)[channel];
    case DType::kBFloat16:
      return reinterpret_cast<const c10::BFloat16*>(row)[channel];
    case DType::kFloat8E4M3:
      return DequantizeE4M3(reinterpret_cast<const uint8_t*>(row)[channel]);
  }
  return 0.0f;
}

void WriteChannel(void* base, int64_t at, DType dtype, float value) {
  switch (dtype) {
    case DType::kFloat16:
      static_cast<c10::Half*>(base)[at] = value;
      return;
    case DType::kBFloat16:
      static_cast<c10::BFloat16*>(base)[at] = value;
      return;
    default:
      static_cast<float*>(base)[at] = value;
  }
}

// All heads of one block of one layer, from the cache that now holds its tokens.
void SummarizeBlock(const CommitParams& params, int layer, int32_t request, int32_t row,
                    int32_t block) {
  const CommitSummaries& to = params.summaries;
  const CommitLayer& from = params.layers[layer];
  const CacheGeometry& geometry = params.groups[from.group].geometry;
  const int64_t bytes = ElementBytes(geometry.dtype);
  const int64_t first = to.start_token + int64_t{block} * to.block_size;
  for (int head = 0; head < geometry.num_heads; ++head) {
    const float* scales = from.scales.key;
    const float scale = scales == nullptr ? 1.0f : scales[from.scales.key_count == 1 ? 0 : head];
    const int64_t at = layer * to.layer_stride + row * to.row_stride + block * to.block_stride +
                       head * to.head_stride;
    for (int channel = 0; channel < geometry.head_dim; ++channel) {
      // The second argument may be NaN, which then counts for nothing.
      float high = -std::numeric_limits<float>::infinity(), low = -high;
      for (int32_t i = 0; i < to.block_size; ++i) {
        const int64_t token = first + i;
        const int64_t page = to.block_table[request * to.table_stride + token / geometry.page_size];
        const std::byte* keys =
            static_cast<const std::byte*>(from.key) +
            (page * geometry.key.page + token % geometry.page_size * geometry.key.token +
             head * geometry.key.head) *
                bytes;
        const float k = ReadChannel(keys, channel, geometry.dtype) * scale;
        high = std::max(high, k);
        low = std::min(low, k);
      }
      WriteChannel(to.kmax, at + channel, to.dtype, high);
      WriteChannel(to.kmin, at + channel, to.dtype, low);
    }
  }
}

// Whether the cache has every page of a block.
bool HasPages(const CommitParams& params, int32_t request, int32_t block) {
  const CommitSummaries& to = params.summaries;
  const CacheGeometry& geometry = params.groups[0].geometry;
  const int64_t first = to.start_token + int64_t{block} * to.block_size;
  const int64_t last = first + to.block_size - 1;
  for (int64_t page = first / geometry.page_size; page <= last / geometry.page_size; ++page) {
    if (page >= to.max_pages) return false;
    const int32_t found = to.block_table[request * to.table_stride + page];
    if (found < 0 || found >= geometry.num_pages) return false;
  }
  return true;
}

}  // namespace

void SummarizeCommitted(const CommitParams& params) {
  for (int32_t b = 0; b < params.num_requests; ++b) {
    const CompletedBlocks blocks = FindCompleted(params.summaries, b, params.counts[b]);
    for (int32_t block = blocks.first; block < blocks.last; ++block) {
      if (!HasPages(params, b, block)) continue;
      for (int layer = 0; layer < params.num_layers; ++layer) {
        SummarizeBlock(params, layer, b, blocks.row, block);
      }
    }
  }
}

}  // namespace nwor
