#pragma once

#include <cstdint>

#include "base/cache_layout.h"
#include "base/types.h"

// The parameters of verify attention for one step and one layer, as kernels take them: pointers,
// strides, sizes. Plain data.
//
// Row t of request b (query_start[b] <= t < query_start[b+1]) attends to
//   the prefix      tokens 0 .. prefix_lens[b]-1 of the paged cache, or the tokens of b's view, and
//   in-flight rows  of its own request, from key and value, never from the cache: those whose bit
//   is
//                   set in tree_mask[t], or rows query_start[b] .. t if there is no mask.
// A row that sees no token gets zeros and an LSE of -infinity.
//
// Shapes: T rows of all requests, B requests, Hq query heads, Hkv KV heads (Hq % Hkv == 0), D
// channels, W mask words. Strides are in elements; channels are contiguous.

namespace nwor {

struct RowStrides {
  int64_t row = 0;
  int64_t head = 0;
};

// Per-head lists of fixed-size token blocks inside the paged cache. Block id =
// page * (page_size / block_size) + part; ids of one head are in token order.
struct PartialViewParams {
  const int32_t* blocks = nullptr;      // [B, Hkv, max_blocks]
  const int32_t* num_blocks = nullptr;  // [B]; -1: b uses its whole prefix. null: no partial view
  const int32_t* view_lens = nullptr;   // [B] tokens; the last block may be partly filled
  int32_t max_blocks = 0;
  int32_t block_size = 0;  // tokens; divides the page size
};

// A contiguous copy of the view's tokens.
struct CompactViewParams {
  const void* keys = nullptr;     // [B, Hkv, N, D]
  const void* values = nullptr;   // likewise
  const int32_t* lens = nullptr;  // [B] tokens; -1: b uses its pages. null: no compact view
  int64_t batch_stride = 0;       // keys and values share strides
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int32_t max_tokens = 0;
};

struct VerifyParams {
  const void* query = nullptr;  // [T, Hq, D]
  const void* key = nullptr;    // [T, Hkv, D]
  const void* value = nullptr;  // [T, Hkv, D]
  void* out = nullptr;          // [T, Hq, D]
  float* lse = nullptr;         // [T, Hq] natural log, or null
  RowStrides query_strides, key_strides, value_strides, out_strides;

  CacheLayout cache;                     // the layer's pages; dtype may be float8 with scales
  const int32_t* block_table = nullptr;  // [B, table_stride]; entries past the prefix are not read
  const int32_t* prefix_lens = nullptr;  // [B]
  const int32_t* query_start = nullptr;  // [B + 1]
  const uint64_t* tree_mask = nullptr;   // [T, mask_words]: bit j = row query_start[b] + j, or null
  int64_t table_stride = 0;
  int32_t max_pages = 0;  // columns of block_table
  int32_t mask_words = 0;

  PartialViewParams view;
  CompactViewParams compact;

  float scale = 1.0f;    // of q.k, before softcap
  float softcap = 0.0f;  // 0: none; else logit = softcap * tanh(logit / softcap)
  int32_t window = 0;    // 0: none; else a row at position p sees positions > p - window
  // CUDA: requests with more rows are skipped; their rows of out and lse are not written. 0: no
  // limit.
  int32_t max_request_rows = 0;
  // CUDA: the launch may read the plan, the block table, the view and the prefix while the launch
  // ahead of it still runs; see VerifyArguments. Off, it reads nothing before that has ended.
  bool prefix_ready = false;

  int32_t num_requests = 0;        // B
  int32_t num_rows = 0;            // T
  int32_t num_heads = 0;           // Hq
  int32_t num_kv_heads = 0;        // Hkv
  int32_t head_dim = 0;            // D
  DType dtype = DType::kBFloat16;  // of query, key, value, out and compact views

  // The first error found on the device: code, request, value. Kernels never clear it. May be null.
  int64_t* status = nullptr;  // [8]
  StreamHandle stream = nullptr;
};

}  // namespace nwor
