#include "drafters/ngram_lookup.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "base/check.h"
#include "base/tensor_layout.h"
#include "drafters/ngram_match.h"

namespace nwor {
namespace {

void LookUpOnCpu(const NgramLookupParams& params) {
  for (int32_t request = 0; request < params.num_requests; ++request) {
    const NgramText text = TextOf(params, request);
    uint32_t best = 0;
    for (int32_t end = 0; end < text.size - 1; ++end) {
      const int32_t common = TokensInCommon(text, end, params.max_tokens);
      if (common >= params.min_tokens) best = std::max(best, MatchWord(common, end));
    }
    params.matched[request] = CommonOf(best);
    for (int32_t i = 0; i < params.count; ++i) {
      params.guesses[int64_t{request} * params.count + i] = GuessAt(text, best, i);
    }
  }
}

void CheckArguments(const at::Tensor& text, const at::Tensor& rows, const at::Tensor& lens,
                    const NgramLengths& lengths, int64_t count) {
  NWOR_CHECK(text.dim() == 2 && text.scalar_type() == at::kInt, "text: got ", Describe(text),
             ", expected [rows, capacity] int32");
  NWOR_CHECK(text.size(1) < int64_t{1} << kNgramPositionBits, "text: got a capacity of ",
             text.size(1), ", expected less than ", int64_t{1} << kNgramPositionBits);
  NWOR_CHECK(text.stride(1) == 1 || text.size(1) <= 1, "text: got a stride of ", text.stride(1),
             " between tokens, expected 1");
  CheckIndex(rows, "rows", at::kInt, {-1}, text.device());
  CheckIndex(lens, "lens", at::kInt, {rows.size(0)}, text.device());
  NWOR_CHECK(rows.size(0) <= kMaxGridRows, "rows: got ", rows.size(0), " requests, expected ",
             kMaxGridRows, " or fewer");
  NWOR_CHECK(1 <= lengths.min_tokens && lengths.min_tokens <= lengths.max_tokens &&
                 lengths.max_tokens <= kMaxNgramTokens,
             "min_tokens, max_tokens: got ", lengths.min_tokens, " and ", lengths.max_tokens,
             ", expected 1 <= min_tokens <= max_tokens <= ", kMaxNgramTokens);
  NWOR_CHECK(1 <= count && count < int64_t{1} << kNgramPositionBits, "count: got ", count,
             ", expected 1 or more");
}

}  // namespace

std::pair<at::Tensor, at::Tensor> NgramLookup(const at::Tensor& text, const at::Tensor& rows,
                                              const at::Tensor& lens, const NgramLengths& lengths,
                                              int64_t count) {
  CheckArguments(text, rows, lens, lengths, count);
  at::Tensor guesses = at::empty({rows.size(0), count}, rows.options().dtype(at::kLong));
  at::Tensor matched = at::empty({rows.size(0)}, rows.options());
  if (rows.size(0) == 0) return {guesses, matched};
  NgramLookupParams params;
  params.text = text.const_data_ptr<int32_t>();
  params.text_stride = text.stride(0);
  params.num_rows = static_cast<int32_t>(text.size(0));
  params.capacity = static_cast<int32_t>(text.size(1));
  params.rows = rows.const_data_ptr<int32_t>();
  params.lens = lens.const_data_ptr<int32_t>();
  params.num_requests = static_cast<int32_t>(rows.size(0));
  params.min_tokens = static_cast<int32_t>(lengths.min_tokens);
  params.max_tokens = static_cast<int32_t>(lengths.max_tokens);
  params.count = static_cast<int32_t>(count);
  params.guesses = guesses.mutable_data_ptr<int64_t>();
  params.matched = matched.mutable_data_ptr<int32_t>();
  if (text.device().is_cpu()) {
    LookUpOnCpu(params);
    return {guesses, matched};
  }
#ifdef NWOR_WITH_CUDA
  const c10::DeviceGuard guard(text.device());
  const at::Tensor best = at::zeros({rows.size(0)}, rows.options());
  params.best = static_cast<uint32_t*>(best.mutable_data_ptr());
  params.stream = CurrentStream(text.device());
  LaunchNgramLookup(params);
#endif
  return {guesses, matched};
}

}  // namespace nwor
