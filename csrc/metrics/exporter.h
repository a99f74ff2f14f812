#pragma once

#include <memory>
#include <string>

#include "base/export.h"

// The Prometheus endpoint of the process-wide counters (prometheus-cpp). It is off until
// ServeMetrics is called and reads the counters at each scrape.

namespace nwor {

// The state of the endpoint. A busy port is a state, not a failure of the host.
struct ExporterStatus {
  bool built = false;    // compiled with prometheus-cpp
  bool serving = false;  // in this process
  std::string host;
  int port = 0;         // the bound port
  std::string problem;  // why the last ServeMetrics failed; empty if it did not
};

// Thread-safety: every function may be called from any thread. A forked child does not inherit the
// parent's endpoint: `serving` is false there until the child calls ServeMetrics itself.

// Starts the endpoint and returns the bound port; port 0 means any free one. A second call with the
// same address returns the same port; a call with another address moves the endpoint. If the
// address cannot be had, the call returns -1 and sets ExporterStatus::problem, and an endpoint that
// was serving stays where it is. A move to another host at the same port stops the endpoint for a
// moment. Throws Error for a bad host or port, or a build without prometheus-cpp.
NWOR_EXPORT int ServeMetrics(const std::string& host, int port);
NWOR_EXPORT void StopMetrics();
NWOR_EXPORT ExporterStatus GetExporterStatus();

// The text that a scrape would get.
NWOR_EXPORT std::string RenderMetrics();

}  // namespace nwor
