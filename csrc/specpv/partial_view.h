#pragma once

#include <cstdint>

#include "base/export.h"
#include "base/host_device.h"
#include "base/types.h"
#include "specpv/retrieval.h"

// The view of a partial step, as verify attention takes it: per KV head a list of blocks inside the
// paged cache, in token order. Nothing is copied.
//
//   sink [0, S)   retrieved, from [S, W0)   window [W0, F)   tail [F, N)
//
// W0 is F - window rounded down to a block, so that no token falls between the last candidate and
// the window. Tokens of one request are seen once at most.

namespace nwor {

// In blocks of a request's tokens. The last one may be partly filled.
struct ViewSegments {
  int32_t sink_blocks = 0;   // 0 .. sink_blocks - 1
  int32_t window_begin = 0;  // W0 / block size
  int32_t end = 0;           // blocks of [0, N), the last one possibly partly filled

  NWOR_HOST_DEVICE int32_t candidates() const { return window_begin - sink_blocks; }
};

// REQUIRES: 0 <= full_len <= committed_len.
NWOR_HOST_DEVICE inline ViewSegments SegmentsOf(int32_t full_len, int32_t committed_len,
                                                int32_t sink_blocks, int32_t window_blocks,
                                                int32_t block_size) {
  ViewSegments segments;
  segments.end = (committed_len + block_size - 1) / block_size;
  segments.sink_blocks = sink_blocks < segments.end ? sink_blocks : segments.end;
  const int32_t window_end = full_len / block_size;  // floor(F - window) = floor(F) - window
  const int32_t begin = window_end > window_blocks ? window_end - window_blocks : 0;
  segments.window_begin = begin > segments.sink_blocks ? begin : segments.sink_blocks;
  return segments;
}

struct ViewParams {
  const int32_t* ids = nullptr;             // [L, rows, Hkv, k] candidates, ascending, -1 padded
  const int32_t* rows = nullptr;            // [B] row of request b in ids, or null: row b
  const int32_t* block_table = nullptr;     // [B, table_stride]
  const int32_t* full_lens = nullptr;       // [B] F
  const int32_t* committed_lens = nullptr;  // [B] N
  const int32_t* partial = nullptr;         // [B] 0: request b sees its whole prefix
  int32_t* blocks = nullptr;                // [L, B, Hkv, max_blocks]
  int32_t* num_blocks = nullptr;            // [B] -1: the whole prefix
  int32_t* view_lens = nullptr;             // [B] tokens
  int64_t table_stride = 0;
  int32_t max_pages = 0;
  int32_t num_layers = 0;    // L
  int32_t num_requests = 0;  // B
  int32_t num_rows = 0;      // of ids
  int32_t num_kv_heads = 0;  // Hkv
  int32_t k = 0;
  int32_t max_blocks = 0;
  int32_t sink_blocks = 0;
  int32_t window_blocks = 0;
  int32_t block_size = 0;  // divides page_size
  int32_t page_size = 0;
  StreamHandle stream = nullptr;
};

// A view that would not fit into max_blocks or reach beyond block_table becomes the whole prefix
// (num_blocks -1): a longer way to the right answer. On the CPU lists of one request that differ in
// length, or ids that are no candidates, throw Error before anything is written. On CUDA they make
// it the whole prefix, too; there a list is judged by its length and last id, and an earlier one
// that is no candidate becomes block -1.
NWOR_EXPORT void BuildViewCpu(const ViewParams& params);
NWOR_EXPORT void LaunchBuildView(const ViewParams& params);  // one launch; CUDA builds only

// The block of the cache that holds block `index` of a request's tokens.
NWOR_HOST_DEVICE inline int32_t CacheBlock(const ViewParams& params, int32_t request,
                                           int32_t index) {
  const int32_t parts = params.page_size / params.block_size;
  const int32_t page = params.block_table[request * params.table_stride + index / parts];
  return page * parts + index % parts;
}

}  // namespace nwor
