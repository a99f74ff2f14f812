#pragma once

#include <cstdint>

#include "base/host_device.h"
#include "kv_interceptor/commit/error.h"

// Running totals that commits add to, where they run. What was not committed is settled by the
// commit that closes a round, so that a reader at any moment sees totals that only grow. It was
// rejected, unless that commit was refused: then it has failed.

namespace nwor {

enum CommitCounter : int {
  kCounterCommittedTokens = 0,
  kCounterCommittedBytes = 1,
  kCounterRejectedTokens = 2,
  kCounterRejectedBytes = 3,
  kCounterFailedTokens = 4,
  kCounterOpenTokens = 5,  // committed by the chunks of the round that is open
  kCounterOutcomes = 6,    // one for each CommitError: commits that ended so
  kNumCommitCounters = kCounterOutcomes + kNumCommitErrors,
};
static_assert(kNumCommitCounters <= 32, "one warp of the commit kernel updates them");

// What one commit adds.
struct CountedCommit {
  CommitError error;
  int64_t num_tokens;  // 0 unless the error is kOk
  int64_t bytes_per_token;
  int64_t closing_tokens;  // >= 0: it closes a round that staged so many
};

// A counter after the commit, from what it was before; `open`: what kCounterOpenTokens was.
NWOR_HOST_DEVICE inline int64_t CounterAfter(int counter, int64_t before, int64_t open,
                                             const CountedCommit& commit) {
  const bool closes = commit.closing_tokens >= 0;
  const bool failed = commit.error != CommitError::kOk;
  const int64_t rest = closes ? commit.closing_tokens - open - commit.num_tokens : 0;
  switch (counter) {
    case kCounterCommittedTokens:
      return before + commit.num_tokens;
    case kCounterCommittedBytes:
      return before + commit.num_tokens * commit.bytes_per_token;
    case kCounterRejectedTokens:
      return before + (failed ? 0 : rest);
    case kCounterRejectedBytes:
      return before + (failed ? 0 : rest * commit.bytes_per_token);
    case kCounterFailedTokens:
      return before + (failed ? rest : 0);
    case kCounterOpenTokens:
      return closes ? 0 : open + commit.num_tokens;
    default:
      return before + (counter == kCounterOutcomes + static_cast<int>(commit.error) ? 1 : 0);
  }
}

// One writer at a time: commits of one interceptor are ordered.
inline void AddCommit(int64_t* counters, const CountedCommit& commit) {
  const int64_t open = counters[kCounterOpenTokens];
  for (int counter = 0; counter < kNumCommitCounters; ++counter) {
    counters[counter] = CounterAfter(counter, counters[counter], open, commit);
  }
}

}  // namespace nwor
