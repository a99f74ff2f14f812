#include "drafters/ngram_trials.h"

#include <algorithm>

#include "base/check.h"

namespace nwor {

NgramTrials::NgramTrials(const NgramOptions& options, int64_t limit,
                         const std::vector<int64_t>& text)
    : index_(options), limit_(limit) {
  NWOR_CHECK(limit >= 0, "limit: got ", limit, ", expected at least 0");
  index_.Append(text);
  Begin();
}

void NgramTrials::Begin() {
  guesses_ = index_.Lookup({}, limit_);
  right_ = 0;
}

// A trial takes as many tokens as were right, and one.
void NgramTrials::End() {
  trials_.push_back(right_);
  tokens_ += right_ + 1;
  while (trials_.size() > kFewest && tokens_ - trials_.front() - 1 >= kWindow) {
    tokens_ -= trials_.front() + 1;
    trials_.pop_front();
  }
}

void NgramTrials::Follow(const std::vector<int64_t>& tokens) {
  auto begin = tokens.begin();
  for (auto token = begin; token != tokens.end(); ++token) {
    if (right_ < static_cast<int64_t>(guesses_.size()) && guesses_[right_] == *token) {
      ++right_;
      continue;
    }
    index_.Append({begin, token + 1});
    begin = token + 1;
    End();
    Begin();
  }
  index_.Append({begin, tokens.end()});
}

NgramTrials::Moments NgramTrials::Right(int64_t most) const {
  Moments found;
  double sum = 0.0, squares = 0.0;
  const auto add = [&](int64_t right) {
    const auto value = static_cast<double>(std::min(right, most));
    ++found.count;
    sum += value;
    squares += value * value;
  };
  int64_t best = 0;
  for (const int64_t right : trials_) {
    add(right);
    best = std::max(best, right);
  }
  if (right_ > best) add(right_);
  if (found.count == 0) return found;
  const auto count = static_cast<double>(found.count);
  found.mean = sum / count;
  found.variance = std::max(0.0, squares / count - found.mean * found.mean);
  return found;
}

}  // namespace nwor
