#pragma once

#include <cstdint>

#include "base/reason_table.h"

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

NWOR_REASON_TABLE(FullTrigger, uint8_t, NWOR_FULL_TRIGGERS)

}  // namespace nwor
