#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "base/export.h"
#include "metrics/listen_address.h"

// An HTTP server for one text at one path, and /healthz. One request per connection; GET and HEAD.
//
// One thread serves all clients and never waits for a single one. A request has a deadline for the
// whole of it. When every place is taken, a new client replaces the one that has been connected
// longest without a complete request, so idle connections cannot hold up a scrape.
//
// Why not a library: cpp-httplib 0.11.4 (Debian 12) bounds each read but not a request, takes a
// header line of any length into memory, and lets new clients wait until silent ones release their
// threads: 32 silent connections delay a scrape by 15 seconds. CivetWeb 1.15, which prometheus-cpp
// uses, also waits for silent clients, and its threads have stacks of 100 KiB, too small for
// processes whose libraries (CUDA's) keep much in thread-local storage. Neither lets a forked child
// close its copies of the client sockets.

namespace nwor {

class NWOR_EXPORT HttpServer {
 public:
  // Called by the server's thread.
  using Render = std::function<std::string()>;

  // The time a client has for its request and the answer together.
  static constexpr std::chrono::seconds kPatience{10};

  // Serves the text of `render` at `path`. Returns null if nothing can listen at `address`; then
  // `problem` holds the system's reason.
  static std::unique_ptr<HttpServer> Start(const ListenAddress& address, std::string path,
                                           Render render, std::string* problem,
                                           std::chrono::milliseconds patience = kPatience);

  // Closes every connection, stops the thread and frees the port.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  const ListenAddress& address() const { return address_; }  // with the bound port

  // For a forked child, which does not have the thread: closes the child's copies of the sockets,
  // so that the parent's close ends them. The object must not be destroyed in the child.
  void Abandon() const;

 private:
  struct Client;
  static constexpr int kMaxClients = 64;

  HttpServer(const ListenAddress& address, std::string path, Render render, int listener, int wake,
             std::chrono::milliseconds patience);

  void Run();
  bool Step();
  int NextPlace() const;
  bool Accept();
  void Serve(int place);
  void Drop(int place);
  std::string Answer(const std::string& request) const;

  const ListenAddress address_;
  const std::string path_;
  const Render render_;
  const int listener_, wake_;
  const std::chrono::milliseconds patience_;
  std::unique_ptr<Client[]> clients_;  // only the thread uses them
  // The clients' sockets, -1 where a place is free. Atomic because a fork may come at any time. A
  // child that is forked between accept and the store here, or between the store of -1 and close,
  // keeps a copy; the parent's shutdown ends that connection for both.
  std::array<std::atomic<int>, kMaxClients> sockets_;
  std::chrono::steady_clock::time_point accept_from_;
  std::thread thread_;
};

}  // namespace nwor
