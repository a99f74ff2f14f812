#pragma once

#include "base/check.h"
#include "base/export.h"

// What a client of sessions can act on, each an Error of its own kind. Python has the same names,
// all of them NworError.

namespace nwor {

// Not enough pages, bytes or rows now; ending or evicting something may help.
class NWOR_EXPORT CapacityError : public Error {
 public:
  using Error::Error;
};

// No session of that name: never started, ended, or evicted. Start it again with the whole prompt.
class NWOR_EXPORT UnknownSessionError : public Error {
 public:
  using Error::Error;
};

// Client and server disagree about how much of the sequence is cached. End the session and start it
// again with the whole prompt, or roll back to what both have.
class NWOR_EXPORT DesyncError : public Error {
 public:
  using Error::Error;
};

}  // namespace nwor
