#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <limits>
#include <vector>

#include "base/parallel.h"
#include "tree/fault.h"
#include "tree/logits_rule.h"
#include "tree/probability.h"

namespace nwor {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

float ReadLogit(const LogitsParams& params, int64_t index) {
  switch (params.dtype) {
    case DType::kFloat16:
      return static_cast<const c10::Half*>(params.logits)[index];
    case DType::kBFloat16:
      return static_cast<const c10::BFloat16*>(params.logits)[index];
    default:
      return static_cast<const float*>(params.logits)[index];
  }
}

// One row, from logits to probabilities.
class RowMaker {
 public:
  RowMaker(const LogitsParams& params, int64_t request, int64_t row)
      : params_(params),
        request_(request),
        row_(row),
        size_(params.vocabulary),
        options_(OptionsOf(params.options, request)),
        out_(params.out + (request * params.rows + row) * params.vocabulary) {}

  // Returns the fault, 0 if there is none; a faulty row is all zeros.
  int64_t Run() {
    const int wrong = WrongOption(options_);
    if (wrong != 0) return Fail(TreeFault::kParameter, wrong);
    float largest = kNever;
    for (int64_t v = 0; v < size_; ++v) {
      const float logit = LogitOf(v);
      if (std::isnan(logit) || logit == -kNever) return Fail(TreeFault::kLogits, 0);
      out_[v] = logit;
      largest = std::max(largest, logit);
    }
    if (largest == kNever) return Fail(TreeFault::kLogits, 0);
    if (options_.temperature == 0.0f) {
      const auto best = std::find(out_, out_ + size_, largest) - out_;
      std::fill_n(out_, size_, 0.0f);
      out_[best] = 1.0f;
      return 0;
    }
    for (int64_t v = 0; v < size_; ++v) out_[v] = (out_[v] - largest) / options_.temperature;
    Normalise(TopPThreshold(TopKThreshold()));
    return 0;
  }

 private:
  int64_t Fail(TreeFault fault, int value) {
    std::fill_n(out_, size_, 0.0f);
    return PackFault(fault, static_cast<int32_t>(row_), value);
  }

  float LogitOf(int64_t token) const {
    float logit = ReadLogit(params_, request_ * params_.batch_stride + row_ * params_.row_stride +
                                         token * params_.token_stride);
    if (options_.penalised) {
      int64_t count =
          params_.output_counts == nullptr ? 0 : params_.output_counts[request_ * size_ + token];
      count += DraftsAbove(token);
      const bool in_prompt =
          params_.prompt_mask != nullptr && params_.prompt_mask[request_ * size_ + token] != 0;
      logit = Penalise(logit, options_, count, in_prompt);
    }
    if (params_.bitmask != nullptr) {
      const int32_t word =
          params_
              .bitmask[request_ * params_.bitmask_batch + row_ * params_.bitmask_row + token / 32];
      if ((static_cast<uint32_t>(word) >> (token % 32) & 1) == 0) return kNever;
    }
    return logit;
  }

  // How often the token stands between the root and this row, the row included.
  int DraftsAbove(int64_t token) const {
    if (params_.tokens == nullptr) return 0;
    const int64_t* tokens = params_.tokens + request_ * params_.rows;
    const int32_t* parents = params_.parents + request_ * params_.rows;
    int count = 0;
    // Only upwards, whatever the parents say: a walk that ends.
    for (int64_t at = row_; at > 0; at = parents[at] < at ? parents[at] : 0) {
      count += tokens[at] == token ? 1 : 0;
    }
    return count;
  }

  // The k-th largest; -infinity where nothing is cut.
  float TopKThreshold() const {
    if (options_.top_k == 0 || options_.top_k >= size_) return kNever;
    std::vector<float> sorted(out_, out_ + size_);
    const auto at = sorted.begin() + (options_.top_k - 1);
    std::nth_element(sorted.begin(), at, sorted.end(), std::greater<>());
    return *at;
  }

  static uint64_t MassOf(float scaled) {
    return FixedProbability(std::exp(scaled));  // at most one
  }

  // Among what is at least `floor`, where the largest reach the mass of top-p.
  float TopPThreshold(float floor) const {
    if (options_.top_p == 1.0f) return floor;
    std::vector<float> sorted;
    uint64_t total = 0;
    for (int64_t v = 0; v < size_; ++v) {
      if (out_[v] < floor || MassOf(out_[v]) == 0) continue;
      sorted.push_back(out_[v]);
      total += MassOf(out_[v]);
    }
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    const double needed = static_cast<double>(options_.top_p) * static_cast<double>(total);
    uint64_t mass = 0;
    for (const float scaled : sorted) {
      mass += MassOf(scaled);
      if (static_cast<double>(mass) >= needed) return scaled;
    }
    return floor;
  }

  void Normalise(float threshold) {
    uint64_t sum = 0;
    for (int64_t v = 0; v < size_; ++v) {
      const float weight = out_[v] < threshold ? 0.0f : std::exp(out_[v]);
      out_[v] = weight < options_.min_p ? 0.0f : weight;
      sum += FixedProbability(out_[v]);
    }
    const auto scale =
        static_cast<float>(static_cast<double>(kProbabilityOne) / static_cast<double>(sum));
    for (int64_t v = 0; v < size_; ++v) out_[v] *= scale;
  }

  const LogitsParams& params_;
  const int64_t request_;
  const int64_t row_;
  const int64_t size_;
  const RowOptions options_;
  float* const out_;
};

}  // namespace

void TargetProbsCpu(const LogitsParams& params) {
  std::fill_n(params.status, params.num_requests, 0);
  const int64_t total = int64_t{params.num_requests} * params.rows;
  std::atomic<int64_t> next{0};
  RunOnTorchThreads(std::min<int64_t>(total, 1 + total * params.vocabulary / 16384), [&] {
    for (int64_t i = next++; i < total; i = next++) {
      const int64_t fault = RowMaker(params, i / params.rows, i % params.rows).Run();
      if (fault == 0) continue;
      // Of several rows of a request any may be told.
      std::atomic_ref<int64_t>(params.status[i / params.rows]).store(fault);
    }
  });
}

}  // namespace nwor
