#pragma once

#include <cstdint>

#include "base/reason_table.h"

// Why drafting over views failed. One line per reason: the metric label
// (specpv_draft_failures_total{reason}) and what people read come from here.

// X(enumerator, label, sentence)
#define NWOR_DRAFT_FAILURES(X)                                                           \
  X(kStart, "start", "passes could not be captured or timed when the engine started")    \
  X(kOutOfMemory, "out_of_memory", "memory ran out")                                     \
  X(kRefused, "refused", "an op refused what it was given, or a layer has another form") \
  X(kError, "error", "something else went wrong in a pass")

namespace nwor {

NWOR_REASON_TABLE(DraftFailure, uint8_t, NWOR_DRAFT_FAILURES)

}  // namespace nwor
