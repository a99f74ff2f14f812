#pragma once

#include <cstdint>

#include "base/reason_table.h"

// How a call of a worker ended. One line per outcome: the metric label
// (nwor_worker_calls_total{outcome}) and what people read come from here.

// X(enumerator, label, sentence)
#define NWOR_CALL_OUTCOMES(X)                                                             \
  X(kAnswered, "answered", "the client got a result")                                     \
  X(kRefused, "refused", "wrong arguments, an unknown session, or lengths that disagree") \
  X(kBusy, "busy", "no room, or too many calls at once")                                  \
  X(kUnauthenticated, "unauthenticated", "the bearer token was missing or wrong")         \
  X(kStopping, "stopping", "the worker was stopping")                                     \
  X(kAbandoned, "abandoned", "the client left, or its deadline passed")                   \
  X(kFailed, "failed", "the model failed")

namespace nwor {

NWOR_REASON_TABLE(CallOutcome, uint8_t, NWOR_CALL_OUTCOMES)

}  // namespace nwor
