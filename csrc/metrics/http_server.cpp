#include "metrics/http_server.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/check.h"

namespace nwor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxRequestBytes = 16 << 10;
constexpr std::chrono::milliseconds kGrace(20);   // a client keeps its place at least so long
constexpr std::chrono::milliseconds kPause(100);  // before another try for a socket or memory
constexpr char kPlainText[] = "text/plain; charset=utf-8";
constexpr char kExposition[] = "text/plain; version=0.0.4; charset=utf-8";

// Blocks all signals while it lives. A thread inherits the mask, so one that starts meanwhile takes
// no signal that is meant for the host.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// Ends the connection even if a forked child has a copy of the socket.
void CloseSocket(int fd) {
  shutdown(fd, SHUT_RDWR);
  close(fd);
}

bool WouldBlock() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

std::string Reply(std::string_view status, std::string_view type, std::string_view body,
                  bool with_body, std::string_view more_headers = "") {
  return Concat("HTTP/1.1 ", status, "\r\nContent-Type: ", type,
                "\r\nContent-Length: ", body.size(), "\r\n", more_headers,
                "Connection: close\r\n\r\n", with_body ? body : std::string_view());
}

std::string Refuse(std::string_view status, bool with_body = true,
                   std::string_view more_headers = "") {
  return Reply(status, kPlainText, Concat(status, "\n"), with_body, more_headers);
}

}  // namespace

// Reads the request, writes the answer, then reads until the client closes: if bytes that the
// client sent were left unread, the system would drop the answer.
struct HttpServer::Client {
  enum class State { kGone, kReading, kWriting, kEnding };

  State state = State::kGone;
  Clock::time_point accepted = Clock::time_point::min();
  std::string request, answer;
  size_t sent = 0;
};

std::unique_ptr<HttpServer> HttpServer::Start(const ListenAddress& address, std::string path,
                                              Render render, std::string* problem,
                                              std::chrono::milliseconds patience) {
  int listener = -1;
  *problem = address.Listen(&listener);
  if (!problem->empty()) return nullptr;
  const int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake < 0) {
    *problem = std::generic_category().message(errno);
    CloseSocket(listener);
    return nullptr;
  }
  std::unique_ptr<HttpServer> server(new HttpServer(ListenAddress::OfSocket(listener),
                                                    std::move(path), std::move(render), listener,
                                                    wake, patience));
  try {
    const BlockedSignals blocked;
    server->thread_ = std::thread([raw = server.get()] { raw->Run(); });
  } catch (const std::system_error& error) {
    *problem = Concat("no thread: ", error.what());
    return nullptr;
  }
  pthread_setname_np(server->thread_.native_handle(), "nwor_metrics");
  return server;
}

HttpServer::HttpServer(const ListenAddress& address, std::string path, Render render, int listener,
                       int wake, std::chrono::milliseconds patience)
    : address_(address),
      path_(std::move(path)),
      render_(std::move(render)),
      listener_(listener),
      wake_(wake),
      patience_(patience),
      clients_(std::make_unique<Client[]>(kMaxClients)) {
  for (std::atomic<int>& socket : sockets_) socket = -1;
}

HttpServer::~HttpServer() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    while (write(wake_, &one, sizeof(one)) < 0 && errno == EINTR) {
    }
    thread_.join();
  }
  for (int place = 0; place < kMaxClients; ++place) Drop(place);
  CloseSocket(listener_);
  close(wake_);
}

void HttpServer::Abandon() const {
  for (const std::atomic<int>& socket : sockets_) {
    if (socket >= 0) close(socket);
  }
  close(listener_);
  close(wake_);
}

void HttpServer::Run() {
  while (true) {
    try {
      if (!Step()) return;
    } catch (const std::exception&) {  // out of memory; there may be some later
      std::this_thread::sleep_for(kPause);
    }
  }
}

// Waits for events and handles them. Returns false when the server is to stop.
bool HttpServer::Step() {
  const Clock::time_point now = Clock::now();
  Clock::time_point next = now + std::chrono::hours(1);
  std::vector<pollfd> polled = {{wake_, POLLIN, 0}};
  std::vector<int> places;
  for (int place = 0; place < kMaxClients; ++place) {
    const Client& client = clients_[place];
    if (client.state == Client::State::kGone) continue;
    const short events = client.state == Client::State::kWriting ? POLLOUT : POLLIN;
    polled.push_back({sockets_[place], events, 0});
    places.push_back(place);
    next = std::min(next, client.accepted + patience_);
  }
  const auto accept_from = std::max(accept_from_, clients_[NextPlace()].accepted + kGrace);
  const bool accepts = now >= accept_from;
  if (accepts) {
    polled.push_back({listener_, POLLIN, 0});
  } else {
    next = std::min(next, accept_from);
  }
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next - now).count();
  if (poll(polled.data(), polled.size(), static_cast<int>(std::max<int64_t>(wait, 0))) < 0) {
    if (errno != EINTR) std::this_thread::sleep_for(kPause);
    return true;
  }
  if (polled[0].revents != 0) return false;
  for (size_t i = 0; i < places.size(); ++i) {
    if (polled[i + 1].revents != 0) Serve(places[i]);
    if (Clock::now() >= clients_[places[i]].accepted + patience_) Drop(places[i]);
  }
  if (accepts && polled.back().revents != 0 && !Accept()) accept_from_ = Clock::now() + kPause;
  return true;
}

// The place for the next client: a free one, else that of the oldest client without a complete
// request or with all of its answer, else that of the oldest client.
int HttpServer::NextPlace() const {
  const auto rank = [](const Client& client) {
    return std::pair(client.state == Client::State::kWriting, client.accepted);
  };
  const Client* const first = clients_.get();
  return static_cast<int>(
      std::min_element(first, first + kMaxClients,
                       [&](const Client& a, const Client& b) { return rank(a) < rank(b); }) -
      first);
}

// Takes the clients that wait. Returns false if the system has no socket for them now.
bool HttpServer::Accept() {
  while (true) {
    const int place = NextPlace();
    const Clock::time_point now = Clock::now();
    if (now < clients_[place].accepted + kGrace) return true;
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return WouldBlock() || errno == ECONNABORTED;
    Drop(place);
    sockets_[place] = fd;
    clients_[place].state = Client::State::kReading;
    clients_[place].accepted = now;
  }
}

void HttpServer::Drop(int place) {
  const int fd = sockets_[place].exchange(-1);
  if (fd >= 0) CloseSocket(fd);
  clients_[place] = Client();
}

// Reads or writes what is possible without waiting.
void HttpServer::Serve(int place) {
  using State = Client::State;
  Client& client = clients_[place];
  const int fd = sockets_[place];
  if (client.state == State::kWriting) {
    const std::string_view rest = std::string_view(client.answer).substr(client.sent);
    const ssize_t count = send(fd, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count < 0) {
      if (!WouldBlock()) Drop(place);
      return;
    }
    client.sent += static_cast<size_t>(count);
    if (client.sent < client.answer.size()) return;
    shutdown(fd, SHUT_WR);
    client.state = State::kEnding;
    return;
  }
  char bytes[4096];
  const ssize_t count = recv(fd, bytes, sizeof(bytes), 0);
  if (count < 0 && WouldBlock()) return;
  if (count <= 0) return Drop(place);
  if (client.state == State::kEnding) return;
  client.request.append(bytes, static_cast<size_t>(count));
  const bool too_large = client.request.size() > kMaxRequestBytes;
  if (!too_large && client.request.find("\r\n\r\n") == std::string::npos) return;
  client.answer =
      too_large ? Refuse("431 Request Header Fields Too Large") : Answer(client.request);
  client.state = State::kWriting;
}

std::string HttpServer::Answer(const std::string& request) const {
  const std::string_view line = std::string_view(request).substr(0, request.find("\r\n"));
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || last == first ||
      line.substr(last + 1).substr(0, 7) != "HTTP/1.") {
    return Refuse("400 Bad Request");
  }
  const std::string_view method = line.substr(0, first);
  const std::string_view target = line.substr(first + 1, last - first - 1);
  const std::string_view path = target.substr(0, target.find('?'));
  const bool with_body = method != "HEAD";
  if (method != "GET" && method != "HEAD") {
    return Refuse("405 Method Not Allowed", with_body, "Allow: GET, HEAD\r\n");
  }
  if (path == "/healthz") return Reply("200 OK", kPlainText, "ok\n", with_body);
  if (path != path_) return Refuse("404 Not Found", with_body);
  try {
    return Reply("200 OK", kExposition, render_(), with_body);
  } catch (const std::exception&) {
    return Refuse("500 Internal Server Error", with_body);
  }
}

}  // namespace nwor
