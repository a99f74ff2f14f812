#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "base/export.h"
#include "kv_interceptor/commit/commit.h"

namespace nwor {

// Block summaries that a commit brings up to date in its own launch, see commit_summaries.h.
struct SummaryTensors {
  at::Tensor kmax, kmin;   // [L, rows, N, Hkv, D] float32, float16 or bfloat16; undefined: none
  at::Tensor block_table;  // [B, pages] int32
  at::Tensor full_lens;    // [B] int32: verified before this step, -1: rows are provisional
  at::Tensor cached_lens;  // [B] int32: in the cache before the accepted rows, roots included
  std::optional<at::Tensor> rows;  // [B] int32
  int64_t block_size = 0;
  int64_t start_token = 0;
};

// Checks them against a commit of num_requests requests whose layers and first group are described.
// No memory is named for tensors that carry shapes only. Throws Error.
NWOR_EXPORT CommitSummaries DescribeSummaries(const SummaryTensors& tensors,
                                              const CommitParams& params, int64_t num_requests,
                                              at::Device device);

}  // namespace nwor
