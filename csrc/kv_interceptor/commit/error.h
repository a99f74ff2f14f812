#pragma once

#include "base/commit_error.h"

// How a commit says what it found: a CommitError in status[0] of the commit op, and where in the
// three words after it (request, index on its path, offending value). Kernels include it.

namespace nwor {

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
