#pragma once

#include <sys/socket.h>

#include <string>

#include "base/export.h"

// Where an endpoint listens: parsing, spelling, and what the system says about it.
//
// Thread-safety: values; every function may be called from any thread.

namespace nwor {

class NWOR_EXPORT ListenAddress {
 public:
  // host: an IPv4 or IPv6 address, or localhost; port: 0 (any free one) to 65535. Throws Error.
  ListenAddress(const std::string& host, int port);

  // Where a socket is bound.
  static ListenAddress OfSocket(int fd);

  int port() const;
  ListenAddress WithPort(int port) const;
  std::string Host() const;  // "127.0.0.1" or "::1"
  std::string Text() const;  // "127.0.0.1:9400" or "[::1]:9400"

  // A socket that listens here, not waited for by any call. Returns why there is none, in the
  // system's words; empty: it is in `fd`, the caller's to close.
  std::string Listen(int* fd) const;

 private:
  ListenAddress() = default;

  sockaddr_storage storage_{};
};

}  // namespace nwor
