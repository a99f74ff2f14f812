#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "attention/merge/merge_rows_params.h"
#include "base/export.h"

// Attention among the in-flight rows, merged with attention over the prefix that another kernel has
// computed (FlashAttention in vLLM, for example). merge_rows_params.h says what a row attends to.

namespace nwor {

struct MergeRowsArguments {
  at::Tensor query;        // [T, Hq, D] float32 (CPU), float16, bfloat16
  at::Tensor key;          // [T, Hkv, D]; with token_lens [B * room, Hkv, D]
  at::Tensor value;        // as key
  at::Tensor prefix_out;   // [T, Hq, D]
  at::Tensor prefix_lse;   // [T, Hq] float32, natural log, any strides; infinite: no token seen
  at::Tensor query_start;  // [B + 1] int32
  std::optional<at::Tensor> tree_mask;  // [T, W] int64; none: causal among the rows
  double scale = 1.0;
  double softcap = 0.0;          // 0: none
  int64_t rows_per_request = 0;  // above 0: rows of every request; query_start is not read
  bool rows_ready = false;       // see MergeRowsParams
  // See MergeRowsParams. Off only behind a launch that is known to end last: VerifyAttention on
  // route cuda, or FlashAttention-3 where its source says so.
  bool ordered = true;
  // [B] int32: key and value hold other tokens of the requests instead of the rows: token_lens[b]
  // tokens of request b, clamped to 0 .. room. Not together with tree_mask or rows_per_request.
  std::optional<at::Tensor> token_lens = std::nullopt;
};

// Writes out [T, Hq, D] and lse [T, Hq] (natural log; may be undefined). `out` may be prefix_out
// itself; otherwise it must not overlap itself or any input. Rows that belong to no request are not
// written. Thread-safe; CPU, or CUDA on the current stream, capturable. Throws nwor::Error on a
// wrong argument before anything is written.
NWOR_EXPORT void MergeRows(const MergeRowsArguments& arguments, const at::Tensor& out,
                           const at::Tensor& lse);

// MergeRows, and `write`: a layer's write of K and V to cache or staging
// (Interceptor::TakeDeferred), in the same launch on CUDA. On the CPU the write is done first.
// `write` may be null.
NWOR_EXPORT void MergeAndWriteRows(const MergeRowsArguments& arguments, const at::Tensor& out,
                                   const at::Tensor& lse, const StageParams* write);

// The CPU implementation. REQUIRES: host memory; float16, bfloat16 or float32.
NWOR_EXPORT void MergeRowsCpu(const MergeRowsParams& params);

}  // namespace nwor
