#pragma once

#include <cstdint>

#include "attention/params.h"
#include "base/types.h"
#include "kv_interceptor/stage/stage.h"

// Parameters of merge_rows as kernels take them: no torch, no CUDA.
//
// Row t of request b attends to the rows of its request that tree_mask shows, or to rows
// query_start[b] .. t without a mask. The result is merged with the row's prefix state by their
// LSEs, in float. A prefix state whose LSE is infinite, of either sign, saw no token and is not
// read. Rows that belong to no request are not written.
//
// With token_lens, key and value do not belong to the rows but to other tokens: all rows of request
// b attend to token_lens[b] tokens from b * token_room on.

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
  const int32_t* token_lens = nullptr;  // [B], or null; not with tree_mask or rows_per_request
  int32_t token_room = 0;               // rows of key and value per request

  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none

  // Above 0: the rows of every request; query_start is not read. Chains only.
  int32_t rows_per_request = 0;
  // CUDA: query, key and value were written before the previous launch on the stream began, so they
  // may be read while it runs. Until that launch has ended, this one writes nothing that it reads,
  // except caches and staging of the in-flight rows.
  bool rows_ready = false;
  // CUDA: the launch begins after all that is before it on the stream has ended. For a prefix whose
  // last launch may end before those ahead of it, as FlashAttention-3's combine does where every
  // request has one split, unless it resets the scheduler's semaphore: its blocks return without
  // waiting for the attention they were launched behind, and a dependent launch, which waits for
  // the combine alone, would read what is not written yet. Not with rows_ready.
  bool ordered = false;

  int32_t num_requests = 0;  // B
  int32_t num_rows = 0;      // T
  int32_t num_heads = 0;     // Hq
  int32_t num_kv_heads = 0;  // Hkv
  int32_t head_dim = 0;      // D
  DType dtype = DType::kBFloat16;

  StreamHandle stream = nullptr;
};

// Merges the rows and does the layer's write, if `write` is not null, in one launch; capturable. A
// write that needs a conversion has its own launch.
// REQUIRES: float16 or bfloat16; D is a multiple of 8 and at most 256; pointers, row and head
// strides are 16-byte aligned. Defined in builds with CUDA.
void LaunchMergeAndWriteRows(const MergeRowsParams& params, const StageParams* write);

}  // namespace nwor
