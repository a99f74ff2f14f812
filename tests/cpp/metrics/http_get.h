#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>

namespace nwor::testing {

// Owns a socket listening on the loopback, or connected to it.
class LoopbackSocket {
 public:
  static LoopbackSocket Listen() {
    LoopbackSocket socket;
    sockaddr_in address = Loopback(0);
    socklen_t size = sizeof(address);
    if (socket.fd_ >= 0 &&
        bind(socket.fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
        listen(socket.fd_, 1) == 0 &&
        getsockname(socket.fd_, reinterpret_cast<sockaddr*>(&address), &size) == 0) {
      socket.port_ = ntohs(address.sin_port);
    }
    return socket;
  }

  // port() is 0 when nobody answers.
  static LoopbackSocket Connect(int port) {
    LoopbackSocket socket;
    sockaddr_in address = Loopback(port);
    if (socket.fd_ < 0) return socket;
    const timeval patience{20, 0};
    setsockopt(socket.fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    const bool connected =
        connect(socket.fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
    socket.port_ = connected ? port : 0;
    return socket;
  }

  LoopbackSocket(LoopbackSocket&& other) : fd_(other.fd_), port_(other.port_) { other.fd_ = -1; }
  ~LoopbackSocket() {
    if (fd_ >= 0) close(fd_);
  }

  int fd() const { return fd_; }
  int port() const { return port_; }

 private:
  LoopbackSocket() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}

  static sockaddr_in Loopback(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }

  int fd_ = -1;
  int port_ = 0;
};

// What comes until the other side closes.
inline std::string ReadAll(const LoopbackSocket& socket) {
  std::string answer;
  char buffer[4096];
  for (ssize_t size; (size = recv(socket.fd(), buffer, sizeof(buffer), 0)) > 0;) {
    answer.append(buffer, static_cast<size_t>(size));
  }
  return answer;
}

// The whole answer to these bytes, head and body; empty when nobody answers.
inline std::string HttpSend(int port, const std::string& request) {
  const LoopbackSocket socket = LoopbackSocket::Connect(port);
  if (socket.port() == 0) return "";
  if (send(socket.fd(), request.data(), request.size(), MSG_NOSIGNAL) < 0) return "";
  return ReadAll(socket);
}

inline std::string HttpGet(int port, const std::string& path) {
  return HttpSend(port, "GET " + path + " HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
}

}  // namespace nwor::testing
