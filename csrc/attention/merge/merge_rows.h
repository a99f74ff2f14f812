#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "attention/merge/merge_rows_params.h"
#include "base/export.h"

// Adds the rows in flight to attention over the prefix: what is left to do for a host that lets
// another kernel read its pages.

namespace nwor {

struct MergeRowsArguments {
  at::Tensor query;                     // [T, Hq, D] float32 (CPU), float16, bfloat16
  at::Tensor key;                       // [T, Hkv, D]; with token_lens [B * room, Hkv, D]
  at::Tensor value;                     // as key
  at::Tensor prefix_out;                // [T, Hq, D]
  at::Tensor prefix_lse;                // [T, Hq] float32, any strides; infinite: saw nothing
  at::Tensor query_start;               // [B + 1] int32
  std::optional<at::Tensor> tree_mask;  // [T, W] int64; none: causal among the rows
  double scale = 1.0;
  double softcap = 0.0;          // 0: none
  int64_t rows_per_request = 0;  // above 0: every request has so many, query_start is not read
  bool rows_ready = false;       // see MergeRowsParams
  // [B] int32: key and value hold further tokens of the requests, so many of each, instead of the
  // rows; more than there is room for count as that. No tree_mask then.
  std::optional<at::Tensor> token_lens = std::nullopt;
};

// Writes out [T, Hq, D], which may be prefix_out, and lse [T, Hq] (natural log; may be undefined).
// Rows beyond query_start's last are left alone. `write`: a layer's write that the same launch does
// on CUDA (see Interceptor::TakeDeferred); on the CPU it is done first.
// Thread-safe; CPU or CUDA (current stream), capturable. Throws nwor::Error on wrong arguments
// before anything is written.
NWOR_EXPORT void MergeRows(const MergeRowsArguments& arguments, const at::Tensor& out,
                           const at::Tensor& lse, const StageParams* write = nullptr);

// The CPU implementation. REQUIRES: host memory; float16, bfloat16 or float32.
NWOR_EXPORT void MergeRowsCpu(const MergeRowsParams& params);

}  // namespace nwor
