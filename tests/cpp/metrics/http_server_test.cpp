#include "metrics/http_server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "metrics/http_get.h"

namespace nwor {
namespace {

using testing::HttpGet;
using testing::HttpSend;
using testing::LoopbackSocket;
using testing::ReadAll;

std::unique_ptr<HttpServer> Begin(HttpServer::Render render,
                                  const std::string& host = "127.0.0.1") {
  std::string problem;
  auto server = HttpServer::Start(ListenAddress(host, 0), "/text", std::move(render), &problem);
  EXPECT_EQ(problem, "");
  return server;
}

std::string Body(const std::string& answer) {
  const size_t end = answer.find("\r\n\r\n");
  return end == std::string::npos ? "" : answer.substr(end + 4);
}

std::string Status(const std::string& answer) { return answer.substr(0, answer.find("\r\n")); }

TEST(HttpServer, GivesItsTextAndItsLength) {
  const auto server = Begin([] { return std::string("one\ntwo\n"); });
  const std::string answer = HttpGet(server->address().port(), "/text");
  EXPECT_EQ(Status(answer), "HTTP/1.1 200 OK");
  EXPECT_NE(answer.find("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
            std::string::npos);
  EXPECT_NE(answer.find("Content-Length: 8\r\n"), std::string::npos);
  EXPECT_EQ(Body(answer), "one\ntwo\n");
  EXPECT_EQ(Body(HttpGet(server->address().port(), "/text?name[]=x")), "one\ntwo\n");
}

TEST(HttpServer, SaysWhatItDoesNotDo) {
  const auto server = Begin([] { return std::string("text"); });
  const int port = server->address().port();
  const auto status = [&](const std::string& line) {
    return Status(HttpSend(port, line + "\r\nHost: test\r\n\r\n"));
  };
  EXPECT_EQ(status("GET / HTTP/1.1"), "HTTP/1.1 404 Not Found");
  EXPECT_EQ(status("GET /text/more HTTP/1.1"), "HTTP/1.1 404 Not Found");
  EXPECT_EQ(status("POST /text HTTP/1.1"), "HTTP/1.1 405 Method Not Allowed");
  EXPECT_EQ(status("GET /text"), "HTTP/1.1 400 Bad Request");
  EXPECT_EQ(status("GET /text HTTP/2"), "HTTP/1.1 400 Bad Request");
  EXPECT_EQ(status("nonsense"), "HTTP/1.1 400 Bad Request");
  EXPECT_EQ(Status(HttpSend(port, std::string(20000, 'a'))),
            "HTTP/1.1 431 Request Header Fields Too Large");
  const std::string head = HttpSend(port, "HEAD /text HTTP/1.0\r\n\r\n");
  EXPECT_EQ(Status(head), "HTTP/1.1 200 OK");
  EXPECT_NE(head.find("Content-Length: 4\r\n"), std::string::npos);
  EXPECT_EQ(Body(head), "");
  const std::string missing = HttpSend(port, "HEAD / HTTP/1.0\r\n\r\n");
  EXPECT_EQ(Status(missing), "HTTP/1.1 404 Not Found");
  EXPECT_EQ(Body(missing), "");
}

TEST(HttpServer, TellsOfATextThatCannotBeMade) {
  const auto server = Begin([]() -> std::string { throw std::runtime_error("injected"); });
  const std::string answer = HttpGet(server->address().port(), "/text");
  EXPECT_EQ(Status(answer), "HTTP/1.1 500 Internal Server Error");
  EXPECT_EQ(answer.find("injected"), std::string::npos);
}

TEST(HttpServer, PutsPiecesOfARequestTogether) {
  const auto server = Begin([] { return std::string("text"); });
  const LoopbackSocket client = LoopbackSocket::Connect(server->address().port());
  for (const char byte : std::string("GET /text HTTP/1.1\r\nHost: test\r\n\r\n")) {
    ASSERT_EQ(send(client.fd(), &byte, 1, MSG_NOSIGNAL), 1);
    std::this_thread::yield();
  }
  EXPECT_EQ(Body(ReadAll(client)), "text");
}

// One that reads late does not keep the others waiting, and gets all of it.
TEST(HttpServer, WaitsForNobody) {
  const std::string text(32 << 20, 'x');  // more than the sockets' buffers hold
  std::atomic<int> rendered{0};
  const auto server = Begin([&] { return ++rendered == 1 ? text : std::string("short"); });
  const int port = server->address().port();
  const LoopbackSocket slow = LoopbackSocket::Connect(port);
  const LoopbackSocket silent = LoopbackSocket::Connect(port);
  const std::string request = "GET /text HTTP/1.1\r\n\r\n";
  ASSERT_GT(send(slow.fd(), request.data(), request.size(), MSG_NOSIGNAL), 0);
  while (rendered == 0) std::this_thread::yield();
  for (int i = 0; i < 5; ++i) EXPECT_EQ(Body(HttpGet(port, "/text")), "short");
  EXPECT_EQ(Body(ReadAll(slow)).size(), text.size());
}

TEST(HttpServer, ServesManyAtOnce) {
  const auto server = Begin([] { return std::string(10000, 'y'); });
  const int port = server->address().port();
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 50; ++j) right += Body(HttpGet(port, "/text")).size() == 10000;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 16 * 50);
}

// Those beyond the ones it serves at once are served when others are gone.
TEST(HttpServer, LetsMoreThanItServesWaitTheirTurn) {
  const auto server = Begin([] { return std::string("text"); });
  const int port = server->address().port();
  std::vector<LoopbackSocket> silent;
  for (int i = 0; i < 40; ++i) silent.push_back(LoopbackSocket::Connect(port));
  std::string got;
  std::thread late([&] { got = Body(HttpGet(port, "/text")); });
  silent.clear();
  late.join();
  EXPECT_EQ(got, "text");
}

TEST(HttpServer, SaysWhyNobodyCanListen) {
  const LoopbackSocket occupant = LoopbackSocket::Listen();
  std::string problem;
  EXPECT_EQ(HttpServer::Start(
                ListenAddress("127.0.0.1", occupant.port()), "/text", [] { return std::string(); },
                &problem),
            nullptr);
  EXPECT_EQ(problem, "Address already in use");
}

TEST(HttpServer, ListensAtIpv6AddressesWhereTheSystemHasThem) {
  std::string problem;
  const auto server = HttpServer::Start(
      ListenAddress("::1", 0), "/text", [] { return std::string("text"); }, &problem);
  if (server == nullptr) {
    EXPECT_NE(problem, "");  // a system without: its words
    return;
  }
  EXPECT_EQ(server->address().Text(), Concat("[::1]:", server->address().port()));
  EXPECT_GT(server->address().port(), 0);
}

}  // namespace
}  // namespace nwor
