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

// An HTTP server for one text: GET of one path, one request per connection.
//
// One thread of the usual stack serves all clients and waits for none of them: who is slow, or says
// nothing, is let go after some seconds. Servers in libraries may ask for smaller stacks than a
// process allows whose libraries keep much in thread-local storage, as those of CUDA do.

namespace nwor {

class NWOR_EXPORT HttpServer {
 public:
  // Called by the server's thread.
  using Render = std::function<std::string()>;

  // Serves what `render` gives at `path`. Null if nobody can listen there: `problem` says why, in
  // the system's words.
  static std::unique_ptr<HttpServer> Start(const ListenAddress& address, std::string path,
                                           Render render, std::string* problem);

  // Stops: clients are let go, whatever they wait for, and the port is free.
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  const ListenAddress& address() const { return address_; }  // with the bound port

  // In a forked child, where the thread is not: gives up its copies of the sockets, so that the
  // parent's are gone when it closes them. The object must not be destroyed there.
  void Abandon() const;

 private:
  struct Client;
  static constexpr int kMaxClients = 32;  // others wait to be accepted

  HttpServer(const ListenAddress& address, std::string path, Render render, int listener, int wake);

  void Run();
  bool Wait();
  bool Accept();
  void Serve(Client* client, short events);
  std::string Answer(const std::string& request) const;

  const ListenAddress address_;
  const std::string path_;
  const Render render_;
  const int listener_, wake_;
  std::unique_ptr<Client[]> clients_;  // the thread's own
  // Their sockets, -1 where there is none: a fork may come at any time. Between accepting and
  // noting it, or forgetting and closing, a child keeps a copy; the parent ends the connection for
  // both.
  std::array<std::atomic<int>, kMaxClients> sockets_;
  std::chrono::steady_clock::time_point accept_from_;
  std::thread thread_;
};

}  // namespace nwor
