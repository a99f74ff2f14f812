#pragma once

#include <cstdint>

#include "base/reason_table.h"

// Why a write was not staged, or a commit not done in one piece. One line per reason: its log text,
// its metric label (nwor_fallback_total{reason}) and its entry in status() come from here.

// X(enumerator, label, sentence)
#define NWOR_BYPASS_REASONS(X)                                                               \
  X(kNone, "none", "nothing was bypassed")                                                   \
  X(kDisabled, "disabled", "no write on reject is switched off by configuration")            \
  X(kNotReady, "not_ready", "the layer's cache has no memory behind it yet")                 \
  X(kFakeTensor, "fake_tensor", "the tensors carry shapes only (tracing), there is no data") \
  X(kUnboundLayer, "unbound_layer", "the layer was never bound")                             \
  X(kCapacity, "capacity", "the round has more draft rows than staging may hold")            \
  X(kOutOfMemory, "out_of_memory", "there was no memory for staging")                        \
  X(kUnsupportedLayout, "unsupported_layout", "the cache layout or dtype is not supported")  \
  X(kSlotMismatch, "slot_mismatch", "two layers of one cache group gave different slots")    \
  X(kStaleRound, "stale_round", "the write belongs to a round that is over")                 \
  X(kIncompleteStaging, "incomplete_staging",                                                \
    "a layer did not stage every draft row of the round")                                    \
  X(kRankDisagreement, "rank_disagreement", "ranks accepted different tokens")               \
  X(kCommitFailure, "commit_failure",                                                        \
    "the commit failed and accepted rows were written one by one")                           \
  X(kCommitLost, "commit_lost", "accepted rows could not be written")

namespace nwor {

NWOR_REASON_TABLE(BypassReason, uint8_t, NWOR_BYPASS_REASONS)

}  // namespace nwor
