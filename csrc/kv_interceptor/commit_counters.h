#pragma once

#include <cstdint>

#include "host_device.h"

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

// One writer at a time: commits of one interceptor are ordered.
NWOR_HOST_DEVICE inline void AddCommit(int64_t* counters, bool ok, int64_t num_tokens,
                                       int64_t bytes_per_token, int64_t closing_tokens) {
  counters[ok ? kCounterCommits : kCounterFailedCommits] += 1;
  counters[kCounterCommittedTokens] += num_tokens;
  counters[kCounterCommittedBytes] += num_tokens * bytes_per_token;
  counters[kCounterOpenTokens] += num_tokens;
  if (closing_tokens < 0) return;
  const int64_t rejected = closing_tokens - counters[kCounterOpenTokens];
  counters[kCounterRejectedTokens] += rejected;
  counters[kCounterRejectedBytes] += rejected * bytes_per_token;
  counters[kCounterOpenTokens] = 0;
}

}  // namespace nwor
