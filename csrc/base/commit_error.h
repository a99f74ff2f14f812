#pragma once

#include <cstdint>

#include "base/reason_table.h"

// What a commit found wrong. One line per error: the metric label
// (nwor_commit_failures_total{reason}) and what people read come from here. Plain data without
// torch: kernels include it.

// X(enumerator, label, sentence)
#define NWOR_COMMIT_ERRORS(X)                                                                \
  X(kOk, "ok", "the accepted rows were committed")                                           \
  X(kCountRange, "count_range", "a count is negative or larger than the depth of the path")  \
  X(kPathRange, "path_range", "the path names a row outside staging or outside its request") \
  X(kNotAChain, "not_a_chain", "the path does not follow parent links downwards")            \
  X(kSlotRange, "slot_range", "a destination slot is outside the cache")                     \
  X(kDuplicateSlot, "duplicate_slot", "two accepted rows have one destination slot")         \
  X(kStaleRound, "stale_round", "the round is over")                                         \
  X(kSlotMismatch, "slot_mismatch", "two layers of one cache group gave different slots")    \
  X(kIncompleteStaging, "incomplete_staging", "a layer did not stage every draft row")       \
  X(kRankDisagreement, "rank_disagreement", "ranks accepted different tokens")               \
  X(kTailFull, "tail_full", "the partial view has no room for the accepted rows")            \
  X(kWriteFailed, "write_failed", "a cache write failed and every byte was put back")

namespace nwor {

NWOR_REASON_TABLE(CommitError, int32_t, NWOR_COMMIT_ERRORS)

}  // namespace nwor
