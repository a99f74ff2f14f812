#pragma once

#include <array>
#include <cstdint>
#include <string_view>

// Why drafting over views failed. One line per reason: the metric label
// (specpv_draft_failures_total{reason}) and what people read come from here.

// X(enumerator, label, sentence)
#define NWOR_DRAFT_FAILURES(X)                                                           \
  X(kStart, "start", "passes could not be captured or timed when the engine started")    \
  X(kOutOfMemory, "out_of_memory", "memory ran out")                                     \
  X(kRefused, "refused", "an op refused what it was given, or a layer has another form") \
  X(kError, "error", "something else went wrong in a pass")

namespace nwor {

enum class DraftFailure : uint8_t {
#define NWOR_ENUMERATOR(name, label, text) name,
  NWOR_DRAFT_FAILURES(NWOR_ENUMERATOR)
#undef NWOR_ENUMERATOR
};

struct DraftFailureText {
  std::string_view label;
  std::string_view sentence;
};

inline constexpr std::array kDraftFailureTexts = {
#define NWOR_TEXT(name, label, text) DraftFailureText{label, text},
    NWOR_DRAFT_FAILURES(NWOR_TEXT)
#undef NWOR_TEXT
};

inline constexpr int kNumDraftFailures = static_cast<int>(kDraftFailureTexts.size());

}  // namespace nwor
