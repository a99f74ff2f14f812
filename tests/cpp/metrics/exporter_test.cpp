#include "metrics/exporter.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "base/build_info.h"
#include "base/check.h"
#include "metrics/counters.h"
#include "metrics/http_get.h"

namespace nwor {
namespace {

using testing::HttpGet;
using testing::LoopbackSocket;

// The value of a series as the text spells it, empty when the series is missing.
std::string Value(const std::string& text, const std::string& series) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind(series + " ", 0) == 0) return line.substr(series.size() + 1);
  }
  return "";
}

double Number(const std::string& text, const std::string& series) {
  const std::string value = Value(text, series);
  return value.empty() ? -1 : std::stod(value);
}

// Runs the body in a forked child; true when it returned true.
bool InChild(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a child that hangs is a failure, not a hanging test
    _exit(body() ? 0 : 1);
  }
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

class Exporter : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!GetExporterStatus().built) GTEST_SKIP() << "built without prometheus-cpp";
    unsetenv("RANK");
    unsetenv("LOCAL_RANK");
  }
  void TearDown() override { StopMetrics(); }
};

TEST_F(Exporter, IsOffUntilAskedAndOffAgainWhenStopped) {
  EXPECT_FALSE(GetExporterStatus().serving);
  const int port = ServeMetrics("127.0.0.1", 0);
  ASSERT_GT(port, 0);
  const ExporterStatus status = GetExporterStatus();
  EXPECT_TRUE(status.serving);
  EXPECT_EQ(status.host, "127.0.0.1");
  EXPECT_EQ(status.port, port);
  EXPECT_EQ(status.problem, "");
  EXPECT_NE(HttpGet(port, "/metrics").find("200 OK"), std::string::npos);
  EXPECT_EQ(HttpGet(port, "/etc/passwd").find("200 OK"), std::string::npos);
  StopMetrics();
  StopMetrics();
  EXPECT_FALSE(GetExporterStatus().serving);
  EXPECT_EQ(HttpGet(port, "/metrics"), "");
}

TEST_F(Exporter, RendersEveryCounterReasonAndBucketBeforeAnythingHappened) {
  const std::string text = RenderMetrics();
  for (const CounterText& counter : kCounterTexts) {
    EXPECT_GE(Number(text, counter.metric), 0) << counter.metric;
    EXPECT_NE(text.find(Concat("# TYPE ", counter.metric, " counter\n")), std::string::npos);
    EXPECT_NE(text.find(Concat("# HELP ", counter.metric, " ", counter.help, "\n")),
              std::string::npos);
  }
  for (const ReasonText& reason : kBypassReasonTexts) {
    const std::string series = Concat("nwor_fallback_total{reason=\"", reason.label, "\"}");
    EXPECT_EQ(Value(text, series).empty(), reason.label == "none") << series;
  }
  EXPECT_GE(Number(text, "nwor_staging_bytes"), 0);
  EXPECT_GE(Number(text, "nwor_commit_seconds_count"), 0);
  EXPECT_GE(Number(text, "nwor_commit_seconds_bucket{le=\"+Inf\"}"), 0);
  EXPECT_NE(text.find("# TYPE nwor_commit_seconds histogram\n"), std::string::npos);
  const BuildInfo& build = GetBuildInfo();
  EXPECT_EQ(Number(text, Concat("nwor_build_info{version=\"", build.version, "\",torch=\"",
                                build.torch, "\",cuda=\"", build.cuda, "\",architectures=\"",
                                build.architectures, "\",revision=\"", build.revision, "\"}")),
            1);
}

TEST_F(Exporter, ServesWhatWasCountedAtTheTimeOfTheScrape) {
  const int port = ServeMetrics("127.0.0.1", 0);
  ASSERT_GT(port, 0);
  const std::string before = HttpGet(port, "/metrics");
  Counters& counters = Counters::Global();
  counters.Add(Counter::kStagedTokens, 8);
  counters.AddFallback(BypassReason::kCapacity);
  counters.AddStagingBytes(4096);
  counters.AddLossyEngines(2);
  counters.ObserveCommitLatency(3e-6);
  counters.ObserveCommitLatency(5.0);
  const std::string after = HttpGet(port, "/metrics");
  const auto grown = [&](const std::string& series) {
    return Number(after, series) - Number(before, series);
  };
  EXPECT_EQ(grown("nwor_staged_tokens_total"), 8);
  EXPECT_EQ(grown("nwor_committed_tokens_total"), 0);
  EXPECT_EQ(grown("nwor_fallback_total{reason=\"capacity\"}"), 1);
  EXPECT_EQ(grown("nwor_staging_bytes"), 4096);
  EXPECT_EQ(grown("specpv_lossy_engines"), 2);
  counters.AddLossyEngines(-2);
  EXPECT_EQ(grown("nwor_commit_seconds_count"), 2);
  EXPECT_NEAR(grown("nwor_commit_seconds_sum"), 5.000003, 1e-9);
  EXPECT_EQ(grown("nwor_commit_seconds_bucket{le=\"+Inf\"}"), 2);
  EXPECT_EQ(grown("nwor_commit_seconds_bucket{le=\"2e-06\"}"), 0);
  EXPECT_EQ(grown("nwor_commit_seconds_bucket{le=\"5e-06\"}"), 1);
  EXPECT_EQ(grown("nwor_commit_seconds_bucket{le=\"0.1\"}"), 1);
  counters.AddStagingBytes(-4096);
}

TEST_F(Exporter, DescribesTheNewestEngineAndNoneInAForkedChild) {
  Counters::Global().DescribeEngine({"ngram", "4", "full", "auto"});
  Counters::Global().DescribeEngine({"eagle3", "15", "lossless", "cuda"});
  const std::string name = "nwor_engine_info{";
  const std::string series =
      name + "drafter=\"eagle3\",draft_tokens=\"15\",mode=\"lossless\",attention=\"cuda\"}";
  const std::string text = RenderMetrics();
  EXPECT_EQ(Value(text, series), "1");
  EXPECT_EQ(text.find(name), text.rfind(name)) << "one series only";
  EXPECT_TRUE(InChild([&] { return RenderMetrics().find(name) == std::string::npos; }));
}

TEST_F(Exporter, LabelsSeriesWithTheRankTheLauncherSet) {
  setenv("LOCAL_RANK", "1", 1);
  EXPECT_GE(Number(RenderMetrics(), "nwor_rounds_total{rank=\"1\"}"), 0);
  setenv("RANK", "5", 1);
  const std::string text = RenderMetrics();
  EXPECT_GE(Number(text, "nwor_rounds_total{rank=\"5\"}"), 0);
  EXPECT_GE(Number(text, "nwor_fallback_total{rank=\"5\",reason=\"capacity\"}"), 0);
  setenv("RANK", "-1", 1);
  unsetenv("LOCAL_RANK");
  EXPECT_GE(Number(RenderMetrics(), "nwor_rounds_total"), 0);
  unsetenv("RANK");
}

TEST_F(Exporter, AnswersTheSameAddressWithThePortItHas) {
  const int port = ServeMetrics("127.0.0.1", 0);
  ASSERT_GT(port, 0);
  EXPECT_EQ(ServeMetrics("127.0.0.1", 0), port);
  EXPECT_EQ(ServeMetrics("127.0.0.1", port), port);
  EXPECT_EQ(ServeMetrics("localhost", port), port);
}

TEST_F(Exporter, NamesABusyPortInItsStatusAndPrintsNothing) {
  const LoopbackSocket occupant = LoopbackSocket::Listen();
  ASSERT_GT(occupant.port(), 0);
  ::testing::internal::CaptureStderr();
  ::testing::internal::CaptureStdout();
  const int port = ServeMetrics("127.0.0.1", occupant.port());
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(port, -1);
  const ExporterStatus status = GetExporterStatus();
  EXPECT_FALSE(status.serving);
  EXPECT_EQ(status.problem, Concat("cannot serve metrics at 127.0.0.1:", occupant.port(),
                                   ": Address already in use"));
  EXPECT_GT(ServeMetrics("127.0.0.1", 0), 0);
  EXPECT_EQ(GetExporterStatus().problem, "");
}

TEST_F(Exporter, MovesToAnotherPortAndStaysWhenItCannot) {
  const int first = ServeMetrics("127.0.0.1", 0);
  ASSERT_GT(first, 0);
  int free_port = 0;
  { free_port = LoopbackSocket::Listen().port(); }
  ASSERT_EQ(ServeMetrics("127.0.0.1", free_port), free_port);
  EXPECT_EQ(HttpGet(first, "/metrics"), "");
  const LoopbackSocket occupant = LoopbackSocket::Listen();
  EXPECT_EQ(ServeMetrics("127.0.0.1", occupant.port()), -1);
  EXPECT_TRUE(GetExporterStatus().serving);
  EXPECT_EQ(GetExporterStatus().port, free_port);
  EXPECT_NE(GetExporterStatus().problem, "");
  EXPECT_NE(HttpGet(free_port, "/metrics").find("nwor_rounds_total"), std::string::npos);
}

TEST_F(Exporter, MovesToAnotherHostAtItsOwnPortAndComesBackWhenItCannot) {
  const int port = ServeMetrics("127.0.0.1", 0);
  ASSERT_GT(port, 0);
  ASSERT_EQ(ServeMetrics("0.0.0.0", port), port);
  EXPECT_EQ(GetExporterStatus().host, "0.0.0.0");
  ASSERT_EQ(ServeMetrics("127.0.0.1", port), port);
  EXPECT_EQ(GetExporterStatus().host, "127.0.0.1");
  EXPECT_EQ(ServeMetrics("192.0.2.1", port), -1);  // an address of documentation, nobody's
  const ExporterStatus status = GetExporterStatus();
  EXPECT_TRUE(status.serving);
  EXPECT_EQ(status.host, "127.0.0.1");
  EXPECT_EQ(status.port, port);
  EXPECT_EQ(status.problem.rfind(Concat("cannot serve metrics at 192.0.2.1:", port, ": "), 0), 0u);
  EXPECT_NE(HttpGet(port, "/metrics").find("nwor_rounds_total"), std::string::npos);
}

TEST_F(Exporter, LeavesNoClientWaitingWhenItStops) {
  const int port = ServeMetrics("127.0.0.1", 0);
  ASSERT_GT(port, 0);
  // More than the server has places for; none sends a request.
  std::vector<LoopbackSocket> clients;
  for (int i = 0; i < 80; ++i) clients.push_back(LoopbackSocket::Connect(port));
  for (const LoopbackSocket& client : clients) ASSERT_GT(client.port(), 0);
  StopMetrics();
  EXPECT_EQ(HttpGet(port, "/metrics"), "");
  for (const LoopbackSocket& client : clients) {
    char byte = 0;
    const ssize_t size = recv(client.fd(), &byte, 1, 0);
    EXPECT_TRUE(size >= 0 || errno == ECONNRESET) << "the client still waits";
  }
}

TEST_F(Exporter, RefusesWrongAddressesWithGotAndExpected) {
  for (const std::string host : {"", "not a host", "127.0.0.1:80", "127.0.0.1,8080", "300.0.0.1"}) {
    try {
      ServeMetrics(host, 0);
      ADD_FAILURE() << host;
    } catch (const Error& error) {
      EXPECT_EQ(error.what(),
                Concat("host: got '", host, "', expected an IP address or localhost"));
    }
  }
  for (const int port : {-1, 65536}) {
    try {
      ServeMetrics("127.0.0.1", port);
      ADD_FAILURE() << port;
    } catch (const Error& error) {
      EXPECT_EQ(error.what(), Concat("port: got ", port, ", expected 0 (any) to 65535"));
    }
  }
  EXPECT_FALSE(GetExporterStatus().serving);
}

TEST_F(Exporter, LeavesTheParentServingAndLetsAForkedChildServeItself) {
  Counters::Global().Add(Counter::kRounds, 1);
  const int port = ServeMetrics("127.0.0.1", 0);
  ASSERT_GT(port, 0);
  EXPECT_TRUE(InChild([port] {
    if (GetExporterStatus().serving) return false;
    StopMetrics();  // nothing of its own to stop, and must not wait for the parent's threads
    if (ServeMetrics("127.0.0.1", port) != -1) return false;  // the parent's
    const int own = ServeMetrics("127.0.0.1", 0);
    if (own <= 0 || own == port) return false;
    Counters::Global().Add(Counter::kRounds, 41);
    const bool counted = Number(HttpGet(own, "/metrics"), "nwor_rounds_total") == 41;
    StopMetrics();
    return counted && !GetExporterStatus().serving;
  }));
  EXPECT_TRUE(GetExporterStatus().serving);
  EXPECT_GE(Number(HttpGet(port, "/metrics"), "nwor_rounds_total"), 1);
}

TEST_F(Exporter, FreesThePortAlthoughAForkedChildLives) {
  const int port = ServeMetrics("127.0.0.1", 0);
  ASSERT_GT(port, 0);
  int gate[2];
  ASSERT_EQ(pipe(gate), 0);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    close(gate[1]);
    char byte;
    _exit(read(gate[0], &byte, 1) == 0 ? 0 : 1);  // until the parent closes its end
  }
  close(gate[0]);
  StopMetrics();
  EXPECT_EQ(HttpGet(port, "/metrics"), "");
  EXPECT_EQ(ServeMetrics("127.0.0.1", port), port);
  close(gate[1]);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(Exporter, SurvivesForksWhileItIsScrapedAndRestarted) {
  std::atomic<bool> done{false};
  std::thread scraper([&] {
    while (!done) {
      const int port = GetExporterStatus().port;
      if (port > 0) HttpGet(port, "/metrics");
    }
  });
  std::thread restarter([&] {
    while (!done) {
      ServeMetrics("127.0.0.1", 0);
      StopMetrics();
    }
  });
  int failures = 0;
  for (int i = 0; i < 20; ++i) {
    failures += !InChild([] {
      return !GetExporterStatus().serving && Counters::Global().Read()[Counter::kRounds] == 0 &&
             Number(RenderMetrics(), "nwor_rounds_total") == 0;
    });
  }
  done = true;
  scraper.join();
  restarter.join();
  EXPECT_EQ(failures, 0);
}

TEST(ExporterBuild, RendersOrNamesThePackageToInstall) {
  std::string render_answer;
  std::string serve_answer;
  try {
    render_answer = RenderMetrics();
    serve_answer = Concat("port ", ServeMetrics("127.0.0.1", 0));
    StopMetrics();
  } catch (const Error& error) {
    render_answer = error.what();
    try {
      ServeMetrics("127.0.0.1", 0);
    } catch (const Error& serve_error) {
      serve_answer = serve_error.what();
    }
  }
  const bool built = GetExporterStatus().built;
  const std::string package = "prometheus-cpp-dev";
  EXPECT_NE(render_answer.find(built ? "nwor_rounds_total" : package), std::string::npos);
  EXPECT_NE(serve_answer.find(built ? "port " : package), std::string::npos);
}

}  // namespace
}  // namespace nwor
