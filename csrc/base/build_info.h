#pragma once

#include <string_view>

#include "base/export.h"

namespace nwor {

// What this library was built from and for. Empty cuda and architectures: a CPU-only build.
struct BuildInfo {
  std::string_view version;        // of nwor_specpv
  std::string_view torch;          // torch.__version__ at build time
  std::string_view cuda;           // nvcc's version
  std::string_view architectures;  // CMake's spelling, e.g. "80-real 90a-real 90-virtual"
  std::string_view revision;       // git, or "unknown"
};

NWOR_EXPORT const BuildInfo& GetBuildInfo();

}  // namespace nwor
