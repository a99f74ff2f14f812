#include "metrics/listen_address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <type_traits>

#include "base/check.h"

namespace nwor {
namespace {

template <typename Storage>
auto& V4(Storage& storage) {
  return reinterpret_cast<std::conditional_t<std::is_const_v<Storage>, const sockaddr_in,  //
                                             sockaddr_in>&>(storage);
}
template <typename Storage>
auto& V6(Storage& storage) {
  return reinterpret_cast<std::conditional_t<std::is_const_v<Storage>, const sockaddr_in6,  //
                                             sockaddr_in6>&>(storage);
}

std::string SystemText(int error) { return std::generic_category().message(error); }

}  // namespace

ListenAddress::ListenAddress(const std::string& host, int port) {
  const std::string literal = host == "localhost" ? "127.0.0.1" : host;
  if (inet_pton(AF_INET, literal.c_str(), &V4(storage_).sin_addr) == 1) {
    storage_.ss_family = AF_INET;
  } else if (inet_pton(AF_INET6, literal.c_str(), &V6(storage_).sin6_addr) == 1) {
    storage_.ss_family = AF_INET6;
  } else {
    throw Error(Concat("host: got '", host, "', expected an IP address or localhost"));
  }
  *this = WithPort(port);
}

int ListenAddress::port() const {
  return ntohs(storage_.ss_family == AF_INET ? V4(storage_).sin_port : V6(storage_).sin6_port);
}

ListenAddress ListenAddress::WithPort(int port) const {
  NWOR_CHECK(port >= 0 && port <= 65535, "port: got ", port, ", expected 0 (any) to 65535");
  ListenAddress result = *this;
  auto& field =
      storage_.ss_family == AF_INET ? V4(result.storage_).sin_port : V6(result.storage_).sin6_port;
  field = htons(static_cast<uint16_t>(port));
  return result;
}

std::string ListenAddress::Host() const {
  char text[INET6_ADDRSTRLEN] = "";
  const void* const bytes = storage_.ss_family == AF_INET
                                ? static_cast<const void*>(&V4(storage_).sin_addr)
                                : static_cast<const void*>(&V6(storage_).sin6_addr);
  inet_ntop(storage_.ss_family, bytes, text, sizeof(text));
  return text;
}

std::string ListenAddress::Text() const {
  return storage_.ss_family == AF_INET ? Concat(Host(), ":", port())
                                       : Concat("[", Host(), "]:", port());
}

std::string ListenAddress::Listen(int* fd) const {
  const int made = socket(storage_.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (made < 0) return SystemText(errno);
  const int on = 1;
  setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const socklen_t length =
      storage_.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  if (bind(made, reinterpret_cast<const sockaddr*>(&storage_), length) == 0 &&
      listen(made, SOMAXCONN) == 0) {
    *fd = made;
    return "";
  }
  const int error = errno;
  close(made);
  return SystemText(error);
}

ListenAddress ListenAddress::OfSocket(int fd) {
  ListenAddress found;
  socklen_t length = sizeof(found.storage_);
  getsockname(fd, reinterpret_cast<sockaddr*>(&found.storage_), &length);
  return found;
}

}  // namespace nwor
