#pragma once

#include <array>
#include <cstddef>
#include <string_view>

// Reasons, faults and errors that have a number, a label and a sentence: one line each, in one
// list. The log text, the metric label and the entry in a status report all come from that line.
// Plain data without torch: kernels include it.

namespace nwor {

struct ReasonText {
  std::string_view label;
  std::string_view sentence;
};

}  // namespace nwor

#define NWOR_REASON_ENUMERATOR(name, label, sentence) name,
#define NWOR_REASON_TEXT(name, label, sentence) ::nwor::ReasonText{label, sentence},

// Makes `enum class Reason : Type`, its texts kReasonTexts, their number kNumReasons, and
// Label(reason) and Sentence(reason), from LIST(X) with a line X(enumerator, label, sentence) for
// each. To be used inside a namespace.
#define NWOR_REASON_TABLE(Reason, Type, LIST)                                       \
  enum class Reason : Type { LIST(NWOR_REASON_ENUMERATOR) };                        \
  inline constexpr std::array k##Reason##Texts = {LIST(NWOR_REASON_TEXT)};          \
  inline constexpr int kNum##Reason##s = static_cast<int>(k##Reason##Texts.size()); \
  constexpr std::string_view Label(Reason reason) {                                 \
    return k##Reason##Texts[static_cast<size_t>(reason)].label;                     \
  }                                                                                 \
  constexpr std::string_view Sentence(Reason reason) {                              \
    return k##Reason##Texts[static_cast<size_t>(reason)].sentence;                  \
  }
