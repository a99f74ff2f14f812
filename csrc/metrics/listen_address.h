#pragma once

#include <sys/socket.h>

#include <string>
#include <vector>

#include "export.h"

// Where an endpoint listens: parsing, spelling, and what the system says about it.
//
// Thread-safety: values; every function may be called from any thread.

namespace nwor {

class NWOR_EXPORT ListenAddress {
 public:
  // host: an IPv4 or IPv6 address, or localhost; port: 0 (any free one) to 65535. Throws Error.
  ListenAddress(const std::string& host, int port);

  int port() const;
  bool is_ipv6() const { return storage_.ss_family == AF_INET6; }
  ListenAddress WithPort(int port) const;
  std::string Host() const;  // "127.0.0.1" or "::1"
  std::string Text() const;  // "127.0.0.1:9400" or "[::1]:9400"

  // Why nobody can listen here now, in the system's words; empty: it would work.
  std::string WhyBusy() const;

  // Sockets of this process that listen at exactly this address.
  std::vector<int> FindListeners() const;

  // Sockets of this process that clients reached through a listener at this address.
  std::vector<int> FindAccepted() const;

 private:
  ListenAddress() = default;

  template <typename Predicate>
  static std::vector<int> FindSockets(bool listening, const Predicate& fits);

  sockaddr_storage storage_{};
};

}  // namespace nwor
