#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "base/export.h"
#include "drafters/ngram_index.h"

// How many tokens lookups would have guessed right in a text that grows, without a step that
// verifies them.

namespace nwor {

// A trial is a lookup and the tokens that come after it. It is over with the first token that the
// lookup has not guessed; the next one begins behind that. So trials take as many tokens as steps
// that verify lookups. The latest ones count: those of the last kWindow tokens, kFewest at least.
//
// Thread-safety: const methods may run together; nothing else may run beside the others.
class NWOR_EXPORT NgramTrials {
 public:
  static constexpr int64_t kWindow = 32;
  static constexpr size_t kFewest = 3;

  // Of right guesses of the trials that count.
  struct Moments {
    int64_t count = 0;
    double mean = 0.0;
    double variance = 0.0;
  };

  // Lookups guess at most `limit` tokens. REQUIRES: limit >= 0.
  NgramTrials(const NgramOptions& options, int64_t limit, const std::vector<int64_t>& text);

  // Adds tokens to the text's end.
  void Follow(const std::vector<int64_t>& tokens);

  // If lookups guessed at most `most` tokens. The trial that is not over counts if it is the best.
  Moments Right(int64_t most) const;

  // Right guesses of the trials that are over and count, the latest last, and of the other one.
  const std::deque<int64_t>& trials() const { return trials_; }
  int64_t right() const { return right_; }
  int64_t size() const { return index_.size(); }

 private:
  void Begin();
  void End();

  NgramIndex index_;
  int64_t limit_;
  std::vector<int64_t> guesses_;
  int64_t right_ = 0;
  std::deque<int64_t> trials_;
  int64_t tokens_ = 0;  // that they took
};

}  // namespace nwor
