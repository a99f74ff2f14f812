#pragma once

#include <memory>
#include <string>

#include "base/export.h"

// Prometheus endpoint over the process-wide counters (prometheus-cpp). Off until Serve is called;
// nothing starts at import or before a fork. Reads happen at scrape.

namespace nwor {

// Where the endpoint stands; a busy port is a state, not a failure of the host.
struct ExporterStatus {
  bool built = false;    // compiled with prometheus-cpp
  bool serving = false;  // in this process
  std::string host;
  int port = 0;         // the bound port
  std::string problem;  // why it is not serving although it was asked to; empty: none
};

// Thread-safety: every function may be called from any thread. A forked child does not inherit the
// parent's endpoint: there serving is false until the child calls Serve itself.

// Starts the endpoint and returns the bound port (port 0: any free one). Asked again for the same
// address it returns the port it has; asked for another it moves there. Returns -1 and sets
// ExporterStatus::problem when the port is busy; an endpoint that was serving stays where it is. To
// another host at its own port it moves by stopping first: clients find nobody for a moment.
// Throws Error for a bad host or port, or a build without prometheus-cpp.
NWOR_EXPORT int ServeMetrics(const std::string& host, int port);
NWOR_EXPORT void StopMetrics();
NWOR_EXPORT ExporterStatus GetExporterStatus();

// The exposition text a scrape would get.
NWOR_EXPORT std::string RenderMetrics();

}  // namespace nwor
