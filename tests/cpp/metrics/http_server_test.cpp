#include "metrics/http_server.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
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

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr std::string_view kRequest = "GET /text HTTP/1.1\r\nHost: test\r\n\r\n";

std::unique_ptr<HttpServer> Begin(HttpServer::Render render,
                                  milliseconds patience = HttpServer::kPatience) {
  std::string problem;
  auto server = HttpServer::Start(ListenAddress("127.0.0.1", 0), "/text", std::move(render),
                                  &problem, patience);
  EXPECT_EQ(problem, "");
  return server;
}

bool Send(const LoopbackSocket& client, std::string_view bytes) {
  return send(client.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(bytes.size());
}

// Expects the server to answer a scrape before it has lost its patience with anybody.
void ExpectPromptAnswer(int port) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_NE(HttpGet(port, "/text").find("\r\n\r\ntext"), std::string::npos);
  EXPECT_LT(std::chrono::steady_clock::now() - start, HttpServer::kPatience);
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

TEST(HttpServer, AnswersHealthChecksWithoutRendering) {
  const auto server = Begin([]() -> std::string { throw std::runtime_error("injected"); });
  const std::string answer = HttpGet(server->address().port(), "/healthz");
  EXPECT_EQ(Status(answer), "HTTP/1.1 200 OK");
  EXPECT_NE(answer.find("Content-Type: text/plain; charset=utf-8\r\n"), std::string::npos);
  EXPECT_EQ(Body(answer), "ok\n");
}

TEST(HttpServer, RefusesOtherPathsMethodsAndProtocols) {
  const auto server = Begin([] { return std::string("text"); });
  const int port = server->address().port();
  const auto status = [&](const std::string& line) {
    return Status(HttpSend(port, line + "\r\nHost: test\r\n\r\n"));
  };
  EXPECT_EQ(status("GET / HTTP/1.1"), "HTTP/1.1 404 Not Found");
  EXPECT_EQ(status("GET /text/more HTTP/1.1"), "HTTP/1.1 404 Not Found");
  EXPECT_EQ(status("GET /text"), "HTTP/1.1 400 Bad Request");
  EXPECT_EQ(status("GET /text HTTP/2"), "HTTP/1.1 400 Bad Request");
  EXPECT_EQ(status("nonsense"), "HTTP/1.1 400 Bad Request");
  for (const std::string method : {"POST", "PUT", "DELETE", "OPTIONS", "get"}) {
    const std::string answer = HttpSend(port, method + " /text HTTP/1.1\r\n\r\n");
    EXPECT_EQ(Status(answer), "HTTP/1.1 405 Method Not Allowed");
    EXPECT_NE(answer.find("\r\nAllow: GET, HEAD\r\n"), std::string::npos);
  }
}

TEST(HttpServer, AnswersHeadWithoutABody) {
  const auto server = Begin([] { return std::string("text"); });
  const int port = server->address().port();
  const std::string head = HttpSend(port, "HEAD /text HTTP/1.0\r\n\r\n");
  EXPECT_EQ(Status(head), "HTTP/1.1 200 OK");
  EXPECT_NE(head.find("Content-Length: 4\r\n"), std::string::npos);
  EXPECT_EQ(Body(head), "");
  const std::string missing = HttpSend(port, "HEAD / HTTP/1.0\r\n\r\n");
  EXPECT_EQ(Status(missing), "HTTP/1.1 404 Not Found");
  EXPECT_EQ(Body(missing), "");
}

TEST(HttpServer, RefusesHeadersAbove16KiB) {
  const auto server = Begin([] { return std::string("text"); });
  const int port = server->address().port();
  const std::string line = "GET /text HTTP/1.1\r\n";
  const auto status = [&](size_t size) {
    const std::string header = "X: " + std::string(size - line.size() - 7, 'a') + "\r\n\r\n";
    return Status(HttpSend(port, line + header));
  };
  EXPECT_EQ(status(16384), "HTTP/1.1 200 OK");
  EXPECT_EQ(status(16385), "HTTP/1.1 431 Request Header Fields Too Large");
  std::string many = line;
  for (int i = 0; i < 2000; ++i) many += Concat("X-", i, ": a\r\n");
  EXPECT_EQ(Status(HttpSend(port, many + "\r\n")), "HTTP/1.1 431 Request Header Fields Too Large");
  const std::string endless(1 << 20, 'a');  // no line end at all
  EXPECT_EQ(Status(HttpSend(port, endless)), "HTTP/1.1 431 Request Header Fields Too Large");
}

TEST(HttpServer, AnswersWith500WhenTheTextCannotBeRendered) {
  const auto server = Begin([]() -> std::string { throw std::runtime_error("injected"); });
  const std::string answer = HttpGet(server->address().port(), "/text");
  EXPECT_EQ(Status(answer), "HTTP/1.1 500 Internal Server Error");
  EXPECT_EQ(answer.find("injected"), std::string::npos);
}

TEST(HttpServer, AcceptsARequestInPieces) {
  const auto server = Begin([] { return std::string("text"); });
  const LoopbackSocket client = LoopbackSocket::Connect(server->address().port());
  for (const char byte : kRequest) {
    ASSERT_EQ(send(client.fd(), &byte, 1, MSG_NOSIGNAL), 1);
    std::this_thread::yield();
  }
  EXPECT_EQ(Body(ReadAll(client)), "text");
}

// A slow reader delays nobody and gets the whole text.
TEST(HttpServer, ServesOthersWhileAClientReadsSlowly) {
  const std::string text(32 << 20, 'x');  // more than the sockets' buffers hold
  std::atomic<int> rendered{0};
  const auto server = Begin([&] { return ++rendered == 1 ? text : std::string("text"); });
  const int port = server->address().port();
  const LoopbackSocket slow = LoopbackSocket::Connect(port);
  const LoopbackSocket silent = LoopbackSocket::Connect(port);
  ASSERT_TRUE(Send(slow, kRequest));
  while (rendered == 0) std::this_thread::yield();
  for (int i = 0; i < 5; ++i) ExpectPromptAnswer(port);
  EXPECT_EQ(Body(ReadAll(slow)).size(), text.size());
}

TEST(HttpServer, ServesManyAtOnce) {
  const auto server = Begin([] { return std::string(10000, 'y'); });
  const int port = server->address().port();
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 32; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 25; ++j) right += Body(HttpGet(port, "/text")).size() == 10000;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 32 * 25);
}

TEST(HttpServer, AnswersAScrapeWhileHundredsOfConnectionsAreSilent) {
  const auto server = Begin([] { return std::string("text"); });
  const int port = server->address().port();
  std::vector<LoopbackSocket> silent;
  for (int i = 0; i < 400; ++i) silent.push_back(LoopbackSocket::Connect(port));
  for (int i = 0; i < 10; ++i) ExpectPromptAnswer(port);
}

TEST(HttpServer, AnswersAScrapeWhileSilentConnectionsAreRenewed) {
  const auto server = Begin([] { return std::string("text"); });
  const int port = server->address().port();
  std::atomic<bool> done{false};
  std::atomic<int> renewed{0};
  std::thread renewer([&] {
    std::deque<LoopbackSocket> silent;
    for (; !done; ++renewed) {
      silent.push_back(LoopbackSocket::Connect(port));
      if (silent.size() <= 64) continue;
      silent.pop_front();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  while (renewed < 64) std::this_thread::yield();
  for (int i = 0; i < 50 || renewed < 500; ++i) ExpectPromptAnswer(port);
  done = true;
  renewer.join();
}

// Clients that were answered and stay connected give up their places, too.
TEST(HttpServer, AnswersAScrapeWhileAnsweredClientsStayConnected) {
  const auto server = Begin([] { return std::string("text"); });
  const int port = server->address().port();
  std::vector<LoopbackSocket> answered;
  for (int i = 0; i < 100; ++i) {
    answered.push_back(LoopbackSocket::Connect(port));
    ASSERT_TRUE(Send(answered.back(), kRequest));
  }
  for (int i = 0; i < 10; ++i) ExpectPromptAnswer(port);
}

// So do clients that ask for a long text and never read it.
TEST(HttpServer, AnswersAScrapeWhileNobodyReads) {
  constexpr int kDeaf = 70;  // more than there are places
  std::atomic<int> rendered{0};
  const auto server =
      Begin([&] { return ++rendered <= kDeaf ? std::string(5 << 20, 'x') : std::string("text"); });
  const int port = server->address().port();
  std::vector<LoopbackSocket> deaf;
  for (int i = 0; i < kDeaf; ++i) {
    deaf.push_back(LoopbackSocket::Connect(port));
    ASSERT_TRUE(Send(deaf.back(), kRequest));
    while (rendered <= i) std::this_thread::yield();
  }
  for (int i = 0; i < 10; ++i) ExpectPromptAnswer(port);
}

TEST(HttpServer, CutsAClientThatSendsItsRequestTooSlowly) {
  constexpr milliseconds kShort(400);
  const auto server = Begin([] { return std::string("text"); }, kShort);
  const LoopbackSocket client = LoopbackSocket::Connect(server->address().port());
  const auto start = std::chrono::steady_clock::now();
  ASSERT_TRUE(Send(client, "GET /text HTTP/1.1\r\nX: "));
  while (Send(client, "a") && std::chrono::steady_clock::now() - start < seconds(20)) {
    std::this_thread::sleep_for(milliseconds(10));  // each byte comes well within the deadline
  }
  const auto lasted = std::chrono::steady_clock::now() - start;
  EXPECT_GE(lasted, kShort);
  EXPECT_LT(lasted, 10 * kShort);
  EXPECT_EQ(ReadAll(client), "");
}

TEST(HttpServer, CutsAClientThatReadsItsAnswerTooSlowly) {
  constexpr milliseconds kShort(400);
  const std::string text(32 << 20, 'x');
  const auto server = Begin([&] { return text; }, kShort);
  const LoopbackSocket client = LoopbackSocket::Connect(server->address().port());
  ASSERT_TRUE(Send(client, kRequest));
  std::this_thread::sleep_for(3 * kShort);
  EXPECT_LT(ReadAll(client).size(), text.size());
}

TEST(HttpServer, NamesTheReasonWhenItCannotListen) {
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
