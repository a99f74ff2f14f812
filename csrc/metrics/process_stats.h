#pragma once

#include <optional>

#include "base/export.h"

// Facts about this process from the operating system, in the units of Prometheus' process metrics.

namespace nwor {

// A field stays empty if the system does not provide it.
struct ProcessStats {
  std::optional<double> resident_memory_bytes;
  std::optional<double> cpu_seconds;  // user and system, all threads
  std::optional<double> open_fds;
  std::optional<double> start_time_seconds;  // since the Unix epoch
};

// Reads them from /proc. Thread-safety: any thread. Never throws.
NWOR_EXPORT ProcessStats ReadProcessStats() noexcept;

}  // namespace nwor
