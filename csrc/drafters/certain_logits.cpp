#include "drafters/certain_logits.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "base/check.h"
#include "base/tensor_layout.h"
#include "drafters/certain_logits_params.h"

namespace nwor {
namespace {

void FillOnCpu(const CertainLogitsParams& params) {
  for (int32_t request = 0; request < params.num_requests; ++request) {
    const int32_t row = params.rows[request];
    if (row < 0 || row >= params.num_rows) continue;
    for (int32_t i = std::max(params.starts[request], 0); i < params.drafts; ++i) {
      float* const logits = params.logits + row * params.row_stride + i * params.draft_stride;
      std::fill_n(logits, params.vocabulary, kNoChance);
      const int64_t token = params.tokens[request * params.token_stride + i];
      if (token >= 0 && token < params.vocabulary) logits[token] = 0.0f;
    }
  }
}

}  // namespace

void CertainLogits(at::Tensor logits, const at::Tensor& rows, const at::Tensor& starts,
                   const at::Tensor& tokens) {
  NWOR_CHECK(logits.dim() == 3 && logits.scalar_type() == at::kFloat && logits.stride(2) == 1,
             "logits: got ", Describe(logits),
             ", expected [rows, drafts, vocabulary] float32 with contiguous tokens");
  CheckIndex(rows, "rows", at::kInt, {-1}, logits.device());
  CheckIndex(starts, "starts", at::kInt, {rows.size(0)}, logits.device());
  NWOR_CHECK(rows.size(0) <= kMaxGridRows, "rows: got ", rows.size(0), " requests, expected ",
             kMaxGridRows, " or fewer");
  NWOR_CHECK(tokens.dim() == 2 && tokens.scalar_type() == at::kLong &&
                 tokens.size(0) == rows.size(0) && tokens.size(1) == logits.size(1) &&
                 (tokens.stride(1) == 1 || tokens.size(1) <= 1),
             "tokens: got ", Describe(tokens), ", expected [", rows.size(0), ", ", logits.size(1),
             "] int64 with contiguous drafts");
  CheckDevice(tokens, "tokens", logits.device());
  if (rows.size(0) == 0 || logits.numel() == 0) return;
  CertainLogitsParams params;
  params.logits = logits.mutable_data_ptr<float>();
  params.row_stride = logits.stride(0);
  params.draft_stride = logits.stride(1);
  params.num_rows = static_cast<int32_t>(logits.size(0));
  params.drafts = static_cast<int32_t>(logits.size(1));
  params.vocabulary = logits.size(2);
  params.rows = rows.const_data_ptr<int32_t>();
  params.starts = starts.const_data_ptr<int32_t>();
  params.tokens = tokens.const_data_ptr<int64_t>();
  params.token_stride = tokens.stride(0);
  params.num_requests = static_cast<int32_t>(rows.size(0));
  if (logits.device().is_cpu()) {
    FillOnCpu(params);
    return;
  }
#ifdef NWOR_WITH_CUDA
  const c10::DeviceGuard guard(logits.device());
  params.stream = CurrentStream(logits.device());
  LaunchCertainLogits(params);
#endif
}

}  // namespace nwor
