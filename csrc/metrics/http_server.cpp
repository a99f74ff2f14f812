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
constexpr std::chrono::seconds kPatience(10);     // for a whole request and its answer
constexpr std::chrono::milliseconds kPause(100);  // when a socket or memory cannot be had

// The thread takes no signal meant for the host: it inherits the mask it starts under.
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

// For copies in forked children, too.
void CloseSocket(int fd) {
  shutdown(fd, SHUT_RDWR);
  close(fd);
}

bool MustWait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

std::string Reply(std::string_view status, std::string_view type, std::string_view body,
                  bool with_body) {
  return Concat("HTTP/1.1 ", status, "\r\nContent-Type: ", type,
                "\r\nContent-Length: ", body.size(), "\r\nConnection: close\r\n\r\n",
                with_body ? body : std::string_view());
}

std::string PlainReply(std::string_view status, bool with_body = true) {
  return Reply(status, "text/plain; charset=utf-8", Concat(status, "\n"), with_body);
}

}  // namespace

// Reads a request, writes the answer, and reads on until the other side has closed too: what was
// sent and never read would make the system drop the answer.
struct HttpServer::Client {
  enum class State { kReading, kWriting, kEnding, kGone };

  State state = State::kGone;
  std::string request, answer;
  size_t sent = 0;
  Clock::time_point deadline;
};

std::unique_ptr<HttpServer> HttpServer::Start(const ListenAddress& address, std::string path,
                                              Render render, std::string* problem) {
  int listener = -1;
  *problem = address.Listen(&listener);
  if (!problem->empty()) return nullptr;
  const int wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake < 0) {
    *problem = std::generic_category().message(errno);
    CloseSocket(listener);
    return nullptr;
  }
  std::unique_ptr<HttpServer> server(new HttpServer(
      ListenAddress::OfSocket(listener), std::move(path), std::move(render), listener, wake));
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
                       int wake)
    : address_(address),
      path_(std::move(path)),
      render_(std::move(render)),
      listener_(listener),
      wake_(wake),
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
  for (const std::atomic<int>& socket : sockets_) {
    if (socket >= 0) CloseSocket(socket);
  }
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
      if (!Wait()) return;
    } catch (const std::exception&) {  // no memory: later, perhaps
      std::this_thread::sleep_for(kPause);
    }
  }
}

// For what comes next, and serves it. False: the end.
bool HttpServer::Wait() {
  using State = Client::State;
  const Clock::time_point now = Clock::now();
  Clock::time_point next = now + std::chrono::hours(1);
  std::vector<pollfd> polled = {{wake_, POLLIN, 0}};
  std::vector<int> slots;
  for (int slot = 0; slot < kMaxClients; ++slot) {
    const Client& client = clients_[slot];
    if (client.state == State::kGone) continue;
    const short events = client.state == State::kWriting ? POLLOUT : POLLIN;
    polled.push_back({sockets_[slot], events, 0});
    slots.push_back(slot);
    next = std::min(next, client.deadline);
  }
  const bool has_room = slots.size() < kMaxClients;
  if (has_room && now >= accept_from_) {
    polled.push_back({listener_, POLLIN, 0});
  } else if (has_room) {
    next = std::min(next, accept_from_);
  }
  const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next - now).count();
  if (poll(polled.data(), polled.size(), static_cast<int>(std::max<int64_t>(wait, 0))) < 0) {
    if (errno != EINTR) std::this_thread::sleep_for(kPause);
    return true;
  }
  if (polled[0].revents != 0) return false;
  for (size_t i = 0; i < slots.size(); ++i) {
    Client* client = &clients_[slots[i]];
    if (polled[i + 1].revents != 0) Serve(client, polled[i + 1].revents);
    if (Clock::now() >= client->deadline) client->state = State::kGone;
    if (client->state == State::kGone) CloseSocket(sockets_[slots[i]].exchange(-1));
  }
  if (polled.size() > slots.size() + 1 && polled.back().revents != 0 && !Accept()) {
    accept_from_ = Clock::now() + kPause;
  }
  return true;
}

// False: no socket can be had for now, though somebody waits.
bool HttpServer::Accept() {
  for (int slot = 0; slot < kMaxClients; ++slot) {
    if (clients_[slot].state != Client::State::kGone) continue;
    const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) return MustWait() || errno == ECONNABORTED;
    sockets_[slot] = fd;
    clients_[slot] = Client{Client::State::kReading, {}, {}, 0, Clock::now() + kPatience};
  }
  return true;
}

void HttpServer::Serve(Client* client, short events) {
  using State = Client::State;
  const int fd = sockets_[client - clients_.get()];
  if (client->state == State::kWriting) {
    const std::string_view rest = std::string_view(client->answer).substr(client->sent);
    const ssize_t count = send(fd, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count < 0) {
      if (!MustWait()) client->state = State::kGone;
      return;
    }
    client->sent += static_cast<size_t>(count);
    if (client->sent < client->answer.size()) return;
    shutdown(fd, SHUT_WR);
    client->state = State::kEnding;
    return;
  }
  char bytes[4096];
  const ssize_t count = (events & POLLNVAL) != 0 ? 0 : recv(fd, bytes, sizeof(bytes), 0);
  if (count < 0 && MustWait()) return;
  if (count <= 0) {
    client->state = State::kGone;
    return;
  }
  if (client->state == State::kEnding) return;
  client->request.append(bytes, static_cast<size_t>(count));
  const bool whole = client->request.find("\r\n\r\n") != std::string::npos;
  if (!whole && client->request.size() < kMaxRequestBytes) return;
  client->answer =
      whole ? Answer(client->request) : PlainReply("431 Request Header Fields Too Large");
  client->state = State::kWriting;
}

std::string HttpServer::Answer(const std::string& request) const {
  const std::string_view line = std::string_view(request).substr(0, request.find("\r\n"));
  const size_t first = line.find(' '), last = line.rfind(' ');
  if (first == std::string_view::npos || last == first ||
      line.substr(last + 1).substr(0, 7) != "HTTP/1.") {
    return PlainReply("400 Bad Request");
  }
  const std::string_view method = line.substr(0, first);
  const std::string_view target = line.substr(first + 1, last - first - 1);
  const bool with_body = method != "HEAD";
  if (method != "GET" && with_body) return PlainReply("405 Method Not Allowed");
  if (target.substr(0, target.find('?')) != path_) return PlainReply("404 Not Found", with_body);
  try {
    return Reply("200 OK", "text/plain; version=0.0.4; charset=utf-8", render_(), with_body);
  } catch (const std::exception&) {
    return PlainReply("500 Internal Server Error", with_body);
  }
}

}  // namespace nwor
