#pragma once

#include <cstdint>

#include "attention/params.h"
#include "base/types.h"
#include "kv_interceptor/stage/stage.h"

// In-flight rows added to attention that somebody else has computed over the prefix, as kernels
// take it: no torch, no CUDA.
//
// Row t of request b attends to the rows of its own request that tree_mask shows, or to rows
// query_start[b] .. t without one, and is merged with its prefix state by the LSEs, in float. A
// prefix state whose LSE is infinite, of either sign, saw nothing and is not read. Rows of no
// request are left alone.
//
// With token_lens, key and value are not of the rows but of further tokens: all rows of request b
// attend to the token_lens[b] ones from b * token_room on.

namespace nwor {

struct MergeRowsParams {
  const void* query = nullptr;  // [T, Hq, D]
  const void* key = nullptr;    // [T, Hkv, D], or [B * token_room, Hkv, D]
  const void* value = nullptr;  // as key
  RowStrides query_strides, key_strides, value_strides;

  const void* prefix_out = nullptr;   // [T, Hq, D]; may be `out`
  const float* prefix_lse = nullptr;  // [T, Hq] natural log
  RowStrides prefix_strides, prefix_lse_strides;

  void* out = nullptr;  // [T, Hq, D]
  RowStrides out_strides;
  float* lse = nullptr;  // [T, Hq] contiguous, or null

  const int32_t* query_start = nullptr;  // [B + 1]
  const uint64_t* tree_mask = nullptr;   // [T, mask_words], or null
  int32_t mask_words = 0;
  const int32_t* token_lens = nullptr;  // [B], or null; none of tree_mask, rows_per_request then
  int32_t token_room = 0;               // rows of key and value per request

  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none

  // Above 0: every request has so many rows, and query_start is not read. Chains only.
  int32_t rows_per_request = 0;
  // CUDA: query, key and value were written before the launch ahead of this one began, so that they
  // may be read while it still runs. What that launch reads is not written by this one before it
  // has ended, except for caches and staging of the rows in flight.
  bool rows_ready = false;

  int32_t num_requests = 0;  // B
  int32_t num_rows = 0;      // T
  int32_t num_heads = 0;     // Hq
  int32_t num_kv_heads = 0;  // Hkv
  int32_t head_dim = 0;      // D
  DType dtype = DType::kBFloat16;

  StreamHandle stream = nullptr;
};

// One launch, capturable; `write`: the layer's write, done beside it in the same launch, or null.
// REQUIRES: float16 or bfloat16; D a multiple of 8 and at most 256; 16-byte aligned pointers, row
// and head strides. Defined in builds with CUDA.
void LaunchMergeRows(const MergeRowsParams& params, const StageParams* write);

}  // namespace nwor
