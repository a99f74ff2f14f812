#pragma once

#include <array>
#include <cstdint>
#include <string_view>

// What a commit found wrong. The code is status[0] of the commit op, the three words after it say
// where: request, index on its path, offending value. Plain data without torch: kernels include it.

// X(enumerator, label, sentence)
#define NWOR_COMMIT_ERRORS(X)                                                             \
  X(kOk, "ok", "committed")                                                               \
  X(kCountRange, "count_range", "count is negative or beyond the depth of path")          \
  X(kPathRange, "path_range", "path names a row outside staging or outside its request")  \
  X(kNotAChain, "not_a_chain", "path does not follow parent links downwards")             \
  X(kSlotRange, "slot_range", "destination slot is outside the cache")                    \
  X(kDuplicateSlot, "duplicate_slot", "two accepted rows have one destination slot")      \
  X(kStaleRound, "stale_round", "the round is over")                                      \
  X(kSlotMismatch, "slot_mismatch", "two layers of one cache group gave different slots") \
  X(kIncompleteStaging, "incomplete_staging", "a layer did not stage every draft row")    \
  X(kRankDisagreement, "rank_disagreement", "ranks accepted different tokens")            \
  X(kTailFull, "tail_full", "the partial view has no room for the accepted rows")         \
  X(kWriteFailed, "write_failed", "a cache write failed and every byte was put back")

namespace nwor {

enum class CommitError : int32_t {
#define NWOR_ENUMERATOR(name, label, text) name,
  NWOR_COMMIT_ERRORS(NWOR_ENUMERATOR)
#undef NWOR_ENUMERATOR
};

struct CommitErrorText {
  std::string_view label;
  std::string_view sentence;
};

inline constexpr std::array kCommitErrorTexts = {
#define NWOR_TEXT(name, label, text) CommitErrorText{label, text},
    NWOR_COMMIT_ERRORS(NWOR_TEXT)
#undef NWOR_TEXT
};

constexpr std::string_view Label(CommitError error) {
  return kCommitErrorTexts[static_cast<size_t>(error)].label;
}
constexpr std::string_view Sentence(CommitError error) {
  return kCommitErrorTexts[static_cast<size_t>(error)].sentence;
}

// Words of a status tensor (int64[8]).
enum StatusWord : int {
  kStatusCode = 0,
  kStatusRequest = 1,
  kStatusIndex = 2,
  kStatusValue = 3,
  kStatusCommitted = 4,  // tokens written to every layer; 0 unless the code is kOk
  kNumStatusWords = 8,
};

}  // namespace nwor
