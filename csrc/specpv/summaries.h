#pragma once

#include <cstdint>

#include "base/cache_layout.h"
#include "base/export.h"
#include "base/host_device.h"
#include "base/types.h"

// Block summaries: the channelwise maximum and minimum of K over the tokens of each block, per KV
// head. Retrieval scores blocks by them instead of by their tokens.
//
// A block is always summarised whole, from its tokens' K in the cache. So what is computed block by
// block as the context grows equals what is computed at once, bit for bit. The caller sees to it
// that only verified K is there: a maximum cannot be taken back. A NaN counts for nothing: a
// channel without a number has a maximum of -inf and a minimum of inf.

namespace nwor {

// Distances in elements between requests (by pages: pages), blocks and heads of [B, N, Hkv, D];
// channels are contiguous.
struct SummaryStrides {
  int64_t request = 0;
  int64_t block = 0;
  int64_t head = 0;
};

// Block i of request b covers tokens start_tokens[b] + i * block_size and the block_size - 1 after
// it; it is complete when they all lie before end_tokens[b].
struct SummaryParams {
  CacheLayout cache;                      // K is read, V is not; dtype may be float8 with scales
  const int32_t* block_table = nullptr;   // [B, table_stride]
  const int32_t* start_tokens = nullptr;  // [B]
  const int32_t* end_tokens = nullptr;    // [B]
  const int32_t* done_blocks = nullptr;   // [B] blocks that are summarised already, or null: none
  // [B, N, Hkv, D]; by pages [pages of the cache, blocks of a page, Hkv, D]: summaries of a block
  // lie where its page lies, so requests that share a page share them.
  void* kmax = nullptr;
  void* kmin = nullptr;
  SummaryStrides kmax_strides, kmin_strides;
  DType dtype = DType::kFloat32;  // of the summaries: float32, float16 or bfloat16
  int64_t table_stride = 0;
  int32_t max_pages = 0;   // columns of block_table
  int32_t max_blocks = 0;  // N; by pages as many as the pages of a request have
  int32_t block_size = 0;
  bool by_pages = false;  // start_tokens are multiples of block_size, which divides the page size
  int32_t num_requests = 0;
  StreamHandle stream = nullptr;
};

// Complete blocks of a request.
NWOR_HOST_DEVICE inline int32_t CompleteBlocks(int32_t start, int32_t end, int32_t block_size) {
  return end <= start ? 0 : (end - start) / block_size;
}

// Throws Error naming the request when tokens lie outside its pages, blocks outside the summaries,
// or a page outside the cache, or, by pages, its first token within a block; nothing is written
// then. Threads of torch's pool.
NWOR_EXPORT void SummarizeBlocksCpu(const SummaryParams& params);

// One launch. Blocks outside the summaries and pages outside the cache are left out.
NWOR_EXPORT void LaunchSummarizeBlocks(const SummaryParams& params);  // CUDA builds only

}  // namespace nwor
