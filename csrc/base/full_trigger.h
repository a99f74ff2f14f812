#pragma once

#include <array>
#include <cstdint>
#include <string_view>

// Why a verification step with partial verification at hand was full. One line per trigger: the
// metric label (specpv_full_steps_total{trigger}) and what people read come from here.

// X(enumerator, label, sentence)
#define NWOR_FULL_TRIGGERS(X)                                                            \
  X(kNone, "none", "the step was partial")                                               \
  X(kDisabled, "disabled", "partial verification is switched off")                       \
  X(kShortContext, "short_context", "the context is no longer than the view")            \
  X(kFirst, "first", "no blocks were selected yet")                                      \
  X(kTailFull, "tail_full", "the tail had no room for the next tree")                    \
  X(kInterval, "interval", "specpv_full_refresh_interval partial steps were done")       \
  X(kPolicy, "policy", "the host asked for it")                                          \
  X(kRefreshFailure, "refresh_failure", "blocks could not be selected")                  \
  X(kOffloadFailure, "offload_failure", "the view could not be copied from host memory") \
  X(kTailOverflow, "tail_overflow", "more tokens were accepted than the tail has room for")

namespace nwor {

enum class FullTrigger : uint8_t {
#define NWOR_ENUMERATOR(name, label, text) name,
  NWOR_FULL_TRIGGERS(NWOR_ENUMERATOR)
#undef NWOR_ENUMERATOR
};

struct FullTriggerText {
  std::string_view label;
  std::string_view sentence;
};

inline constexpr std::array kFullTriggerTexts = {
#define NWOR_TEXT(name, label, text) FullTriggerText{label, text},
    NWOR_FULL_TRIGGERS(NWOR_TEXT)
#undef NWOR_TEXT
};

inline constexpr int kNumFullTriggers = static_cast<int>(kFullTriggerTexts.size());

constexpr std::string_view Label(FullTrigger trigger) {
  return kFullTriggerTexts[static_cast<size_t>(trigger)].label;
}

}  // namespace nwor
