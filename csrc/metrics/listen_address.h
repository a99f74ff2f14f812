#pragma once

#include <sys/socket.h>

#include <string>

#include "base/export.h"

// The address at which an endpoint listens.
//
// Thread-safety: a value; every function may be called from any thread.

namespace nwor {

class NWOR_EXPORT ListenAddress {
 public:
  // host: an IPv4 or IPv6 address, or localhost; port: 0 (any free one) to 65535. Throws Error for
  // anything else.
  ListenAddress(const std::string& host, int port);

  // The address that a socket is bound to.
  static ListenAddress OfSocket(int fd);

  int port() const;
  ListenAddress WithPort(int port) const;
  std::string Host() const;  // "127.0.0.1" or "::1"
  std::string Text() const;  // "127.0.0.1:9400" or "[::1]:9400"

  // Makes a non-blocking socket that listens here and stores it in `fd`; the caller closes it.
  // Returns the system's reason if that fails, else an empty string.
  std::string Listen(int* fd) const;

 private:
  ListenAddress() = default;

  sockaddr_storage storage_{};
};

}  // namespace nwor
