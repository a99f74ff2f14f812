#include "tree/likeliest.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "base/check.h"
#include "base/tensor_layout.h"
#include "tree/likeliest_params.h"
#include "tree/probability.h"
#ifdef NWOR_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#endif

namespace nwor {

Likeliest LikeliestTokens(const at::Tensor& logits, int64_t count) {
  const at::Device device = logits.device();
  NWOR_CHECK(logits.dim() >= 1, "logits: got sizes ", logits.sizes(),
             ", expected [.., vocabulary]");
  const int64_t vocabulary = logits.size(-1);
  NWOR_CHECK(vocabulary >= 1 && vocabulary <= kMaxVocabulary, "logits: got a vocabulary of ",
             vocabulary, ", expected 1 .. ", kMaxVocabulary);
  const int64_t most = std::min<int64_t>(kMaxLikeliest, vocabulary);
  NWOR_CHECK(count >= 1 && count <= most, "count: got ", count, ", expected 1 .. ", most);
  LikeliestParams params;
  params.dtype = RowDType(logits, "logits");
  const at::Tensor rows = ContiguousChannels(logits).reshape({-1, vocabulary});
  NWOR_CHECK(rows.size(0) <= std::numeric_limits<int32_t>::max(), "logits: got ", rows.size(0),
             " rows, expected fewer than 2^31");
  std::vector<int64_t> sizes = logits.sizes().vec();
  sizes.back() = count;
  Likeliest found{at::empty(sizes, logits.options().dtype(at::kLong)),
                  at::empty(sizes, logits.options().dtype(at::kFloat))};
  params.logits = rows.const_data_ptr();
  params.row_stride = rows.stride(0);
  params.tokens = found.tokens.mutable_data_ptr<int64_t>();
  params.log_probs = found.log_probs.mutable_data_ptr<float>();
  params.num_rows = rows.size(0);
  params.vocabulary = static_cast<int32_t>(vocabulary);
  params.count = static_cast<int32_t>(count);
  params.stream = CurrentStream(device);
  if (device.is_cpu()) {
    LikeliestCpu(params);
    return found;
  }
#ifdef NWOR_WITH_CUDA
  const c10::cuda::CUDAGuard guard(device);
  if (params.num_rows > 0) LaunchLikeliest(params);
#endif
  return found;
}

}  // namespace nwor
