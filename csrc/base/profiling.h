#pragma once

#include "base/export.h"

// NVTX ranges in a domain of their own ("nwor_specpv"), visible in Nsight Systems and Compute.
// Without a profiler attached a range costs one load and one branch.

namespace nwor {

enum class ProfileRange { kStage, kCommit, kAttend, kRefresh };

// Opens a range for the life of the object, on this thread.
class NWOR_EXPORT ScopedProfileRange {
 public:
  explicit ScopedProfileRange(ProfileRange range);
  ~ScopedProfileRange();
  ScopedProfileRange(const ScopedProfileRange&) = delete;
  ScopedProfileRange& operator=(const ScopedProfileRange&) = delete;
};

}  // namespace nwor
