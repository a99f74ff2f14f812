#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>

#include "base/parallel.h"
#include "tree/likeliest_params.h"

namespace nwor {
namespace {

constexpr float kNoLogit = -std::numeric_limits<float>::infinity();

template <typename T>
float Read(const T* row, int32_t token) {
  const auto logit = static_cast<float>(row[token]);
  return std::isfinite(logit) ? logit : kNoLogit;
}

template <typename T>
void FindInRow(const LikeliestParams& params, int64_t row) {
  const T* const logits = static_cast<const T*>(params.logits) + row * params.row_stride;
  const int32_t count = params.count;
  std::array<float, kMaxLikeliest> best;
  best.fill(kNoLogit);
  int64_t* const tokens = params.tokens + row * count;
  int32_t kept = 0;
  for (int32_t v = 0; v < params.vocabulary; ++v) {
    const float logit = Read(logits, v);
    if (kept == count && !(logit > best[count - 1])) continue;
    // Behind its equals: they have lower ids.
    int32_t place = kept == count ? count - 1 : kept++;
    for (; place > 0 && logit > best[place - 1]; --place) {
      best[place] = best[place - 1];
      tokens[place] = tokens[place - 1];
    }
    best[place] = logit;
    tokens[place] = v;
  }
  const float largest = best[0];
  double sum = 0;
  if (largest != kNoLogit) {
    for (int32_t v = 0; v < params.vocabulary; ++v) sum += std::exp(Read(logits, v) - largest);
  }
  const auto log_sum = static_cast<float>(std::log(sum));
  for (int32_t i = 0; i < count; ++i) {
    params.log_probs[row * count + i] =
        best[i] == kNoLogit ? kNoLogit : (best[i] - largest) - log_sum;
  }
}

}  // namespace

void LikeliestCpu(const LikeliestParams& params) {
  const auto find = params.dtype == DType::kFloat16    ? FindInRow<c10::Half>
                    : params.dtype == DType::kBFloat16 ? FindInRow<c10::BFloat16>
                                                       : FindInRow<float>;
  const int64_t workers = 1 + params.num_rows * params.vocabulary / 16384;
  std::atomic<int64_t> next{0};
  RunOnTorchThreads(std::min(params.num_rows, workers), [&] {
    for (int64_t row = next++; row < params.num_rows; row = next++) find(params, row);
  });
}

}  // namespace nwor
