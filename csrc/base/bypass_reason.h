#pragma once

#include <array>
#include <cstdint>
#include <string_view>

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
  X(kUnsupportedLayout, "unsupported_layout", "the cache layout or dtype is not supported")  \
  X(kSlotMismatch, "slot_mismatch", "two layers of one cache group gave different slots")    \
  X(kStaleRound, "stale_round", "the write belongs to a round that is over")                 \
  X(kIncompleteStaging, "incomplete_staging",                                                \
    "a layer did not stage every draft row of the round")                                    \
  X(kRankDisagreement, "rank_disagreement", "ranks accepted different tokens")               \
  X(kCommitFailure, "commit_failure",                                                        \
    "the commit failed and accepted rows were written one by one")                           \
  X(kCommitLost, "commit_lost", "accepted rows could not be written, the request must end")

namespace nwor {

enum class BypassReason : uint8_t {
#define NWOR_ENUMERATOR(name, label, text) name,
  NWOR_BYPASS_REASONS(NWOR_ENUMERATOR)
#undef NWOR_ENUMERATOR
};

struct BypassReasonText {
  std::string_view label;
  std::string_view sentence;
};

inline constexpr std::array kBypassReasonTexts = {
#define NWOR_TEXT(name, label, text) BypassReasonText{label, text},
    NWOR_BYPASS_REASONS(NWOR_TEXT)
#undef NWOR_TEXT
};

inline constexpr int kNumBypassReasons = static_cast<int>(kBypassReasonTexts.size());

constexpr std::string_view Label(BypassReason reason) {
  return kBypassReasonTexts[static_cast<size_t>(reason)].label;
}
constexpr std::string_view Sentence(BypassReason reason) {
  return kBypassReasonTexts[static_cast<size_t>(reason)].sentence;
}

}  // namespace nwor
