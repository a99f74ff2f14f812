#pragma once

#include <cstdint>

#include "base/host_device.h"

// Running totals that commits add to, where they run. Rejected tokens are settled by the commit
// that closes a round, together with its committed ones, so that a reader at any moment sees totals
// that only grow.

namespace nwor {

enum CommitCounter : int {
  kCounterCommits = 0,
  kCounterFailedCommits = 1,
  kCounterCommittedTokens = 2,
  kCounterCommittedBytes = 3,
  kCounterRejectedTokens = 4,
  kCounterRejectedBytes = 5,
  kCounterOpenTokens = 6,  // committed by the chunks of the round that is open
  kNumCommitCounters = 7,
};

// What one commit adds.
struct CountedCommit {
  bool ok;
  int64_t num_tokens;  // 0 unless ok
  int64_t bytes_per_token;
  int64_t closing_tokens;  // >= 0: it closes a round that staged so many
};

// A counter after the commit, from what it was before; `open`: what kCounterOpenTokens was.
NWOR_HOST_DEVICE inline int64_t CounterAfter(int counter, int64_t before, int64_t open,
                                             const CountedCommit& commit) {
  const bool closes = commit.closing_tokens >= 0;
  const int64_t rejected = closes ? commit.closing_tokens - open - commit.num_tokens : 0;
  switch (counter) {
    case kCounterCommits:
      return before + (commit.ok ? 1 : 0);
    case kCounterFailedCommits:
      return before + (commit.ok ? 0 : 1);
    case kCounterCommittedTokens:
      return before + commit.num_tokens;
    case kCounterCommittedBytes:
      return before + commit.num_tokens * commit.bytes_per_token;
    case kCounterRejectedTokens:
      return before + rejected;
    case kCounterRejectedBytes:
      return before + rejected * commit.bytes_per_token;
    default:  // kCounterOpenTokens
      return closes ? 0 : open + commit.num_tokens;
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
