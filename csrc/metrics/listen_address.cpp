#include "metrics/listen_address.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <system_error>
#include <type_traits>

#include "check.h"

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

std::string ListenAddress::WhyBusy() const {
  const int fd = socket(storage_.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return SystemText(errno);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const socklen_t length =
      storage_.ss_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  const bool works =
      bind(fd, reinterpret_cast<const sockaddr*>(&storage_), length) == 0 && listen(fd, 1) == 0;
  const std::string reason = works ? "" : SystemText(errno);
  close(fd);
  return reason;
}

template <typename Predicate>
std::vector<int> ListenAddress::FindSockets(bool listening, const Predicate& fits) {
  std::vector<int> found;
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) return found;
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] == '.') continue;
    const int fd = static_cast<int>(std::strtol(entry->d_name, nullptr, 10));
    int accepts = 0;
    socklen_t size = sizeof(accepts);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) != 0) continue;
    if ((accepts != 0) != listening) continue;
    ListenAddress local;
    socklen_t length = sizeof(local.storage_);
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&local.storage_), &length) != 0) continue;
    const auto family = local.storage_.ss_family;
    if ((family == AF_INET || family == AF_INET6) && fits(local)) found.push_back(fd);
  }
  closedir(folder);
  return found;
}

std::vector<int> ListenAddress::FindListeners() const {
  return FindSockets(true, [&](const ListenAddress& local) { return local.Text() == Text(); });
}

std::vector<int> ListenAddress::FindAccepted() const {
  // Who listens at every address accepts at the one that the client asked for.
  const bool any = Host() == "0.0.0.0" || Host() == "::";
  return FindSockets(false, [&](const ListenAddress& local) {
    return local.port() == port() && (any || local.Host() == Host());
  });
}

}  // namespace nwor
