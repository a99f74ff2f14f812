#include "metrics/exporter.h"

#include <pthread.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/build_info.h"
#include "base/check.h"
#include "metrics/counters.h"
#include "metrics/http_server.h"
#include "metrics/listen_address.h"
#include "metrics/process_stats.h"

#ifdef NWOR_WITH_PROMETHEUS
#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>
#endif

namespace nwor {

#ifdef NWOR_WITH_PROMETHEUS
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

// ---- the text of a scrape ----------------------------------------------------------------------

// The rank that the launcher set; none outside a distributed job.
Labels RankLabels() {
  for (const char* name : {"RANK", "LOCAL_RANK"}) {
    const char* const text = std::getenv(name);
    if (text == nullptr) continue;
    unsigned rank = 0;
    const char* const end = text + std::strlen(text);
    const auto [stop, error] = std::from_chars(text, end, rank);
    if (error == std::errc() && stop == end) return {{"rank", std::to_string(rank)}};
  }
  return {};
}

MetricFamily Single(const char* name, const char* help, MetricType type, const Labels& labels,
                    double value) {
  ClientMetric metric;
  metric.label = labels;
  (type == MetricType::Counter ? metric.counter.value : metric.gauge.value) = value;
  return {name, help, type, {std::move(metric)}};
}

// A counter with one more label. `texts` names the label's values in the order of `counts`. Values
// before `first` mean that nothing happened and get no series.
template <typename Texts, typename Counts>
MetricFamily ByLabel(const char* name, const char* help, const char* label, const Texts& texts,
                     const Counts& counts, size_t first, const Labels& labels) {
  MetricFamily family{name, help, MetricType::Counter, {}};
  for (size_t i = first; i < counts.size(); ++i) {
    ClientMetric metric;
    metric.label = labels;
    metric.label.push_back({label, std::string(texts[i].label)});
    metric.counter.value = static_cast<double>(counts[i]);
    family.metric.push_back(std::move(metric));
  }
  return family;
}

MetricFamily Fallbacks(const CountersSnapshot& snapshot, const Labels& labels) {
  return ByLabel("nwor_fallback_total", "Fallbacks to the engine's own cache writes, by reason",
                 "reason", kBypassReasonTexts, snapshot.fallbacks, 1, labels);
}

MetricFamily CommitFailures(const CountersSnapshot& snapshot, const Labels& labels) {
  return ByLabel("nwor_commit_failures_total", "Commits that were refused or failed, by reason",
                 "reason", kCommitErrorTexts, snapshot.commit_failures, 1, labels);
}

MetricFamily FullSteps(const CountersSnapshot& snapshot, const Labels& labels) {
  return ByLabel("specpv_full_steps_total", "Verification steps over the whole context, by trigger",
                 "trigger", kFullTriggerTexts, snapshot.full_steps, 1, labels);
}

MetricFamily DraftFailures(const CountersSnapshot& snapshot, const Labels& labels) {
  return ByLabel("specpv_draft_failures_total", "Failures to draft over partial views, by reason",
                 "reason", kDraftFailureTexts, snapshot.draft_failures, 0, labels);
}

MetricFamily WorkerCalls(const CountersSnapshot& snapshot, const Labels& labels) {
  return ByLabel("nwor_worker_calls_total", "Calls that the target worker ended, by outcome",
                 "outcome", kCallOutcomeTexts, snapshot.worker_calls, 0, labels);
}

MetricFamily TokensOf(Summary summary, const CountersSnapshot& snapshot, const Labels& labels) {
  const auto index = static_cast<size_t>(summary);
  ClientMetric metric;
  metric.label = labels;
  metric.summary.sample_count = static_cast<uint64_t>(snapshot.summary_counts[index]);
  metric.summary.sample_sum = static_cast<double>(snapshot.summary_sums[index]);
  return {kSummaryTexts[index].metric,
          kSummaryTexts[index].help,
          MetricType::Summary,
          {std::move(metric)}};
}

MetricFamily Latency(const char* name, const char* help,
                     const std::array<int64_t, kCommitLatencyBounds.size() + 1>& buckets,
                     double sum_seconds, const Labels& labels) {
  ClientMetric metric;
  metric.label = labels;
  uint64_t cumulative = 0;
  for (size_t i = 0; i < buckets.size(); ++i) {
    cumulative += static_cast<uint64_t>(buckets[i]);
    const double bound = i < kCommitLatencyBounds.size() ? kCommitLatencyBounds[i]
                                                         : std::numeric_limits<double>::infinity();
    metric.histogram.bucket.push_back({cumulative, bound});
  }
  metric.histogram.sample_count = cumulative;
  metric.histogram.sample_sum = sum_seconds;
  return {name, help, MetricType::Histogram, {std::move(metric)}};
}

MetricFamily Build() {
  const BuildInfo& info = GetBuildInfo();
  const Labels labels = {{"version", std::string(info.version)},
                         {"torch", std::string(info.torch)},
                         {"cuda", std::string(info.cuda)},
                         {"architectures", std::string(info.architectures)},
                         {"revision", std::string(info.revision)}};
  return Single("nwor_build_info", "Always 1; labels describe the build", MetricType::Gauge, labels,
                1);
}

// Has no series until an engine is described.
MetricFamily Engine(const std::optional<EngineInfo>& engine, Labels labels) {
  constexpr char kName[] = "nwor_engine_info", kHelp[] = "Always 1; labels describe the engine";
  if (!engine) return {kName, kHelp, MetricType::Gauge, {}};
  labels.push_back({"drafter", engine->drafter});
  labels.push_back({"draft_tokens", engine->draft_tokens});
  labels.push_back({"mode", engine->mode});
  labels.push_back({"attention", engine->attention});
  return Single(kName, kHelp, MetricType::Gauge, labels, 1);
}

void AppendProcess(std::vector<MetricFamily>& families) {
  const ProcessStats stats = ReadProcessStats();
  const auto append = [&](const char* name, const char* help, MetricType type,
                          const std::optional<double>& value) {
    if (value) families.push_back(Single(name, help, type, {}, *value));
  };
  append("process_resident_memory_bytes", "Resident memory size in bytes", MetricType::Gauge,
         stats.resident_memory_bytes);
  append("process_cpu_seconds_total", "User and system CPU time spent in seconds",
         MetricType::Counter, stats.cpu_seconds);
  append("process_open_fds", "Open file descriptors", MetricType::Gauge, stats.open_fds);
  append("process_start_time_seconds", "Start time of the process since the Unix epoch in seconds",
         MetricType::Gauge, stats.start_time_seconds);
}

class CountersCollectable : public prometheus::Collectable {
 public:
  // Reads the environment on the caller's thread: getenv on the scrape thread could race setenv.
  CountersCollectable() : labels_(RankLabels()) {}

  std::vector<MetricFamily> Collect() const override {
    const CountersSnapshot snapshot = Counters::Global().Read();
    std::vector<MetricFamily> families;
    for (int i = 0; i < kNumCounters; ++i) {
      const CounterText& text = kCounterTexts[static_cast<size_t>(i)];
      families.push_back(
          Single(text.metric, text.help, MetricType::Counter, labels_,
                 text.Unit() * static_cast<double>(snapshot[static_cast<Counter>(i)])));
    }
    families.push_back(Fallbacks(snapshot, labels_));
    families.push_back(CommitFailures(snapshot, labels_));
    families.push_back(WorkerCalls(snapshot, labels_));
    families.push_back(Single("nwor_staging_bytes", "Bytes held by staging buffers",
                              MetricType::Gauge, labels_,
                              static_cast<double>(snapshot.staging_bytes)));
    families.push_back(Single("nwor_sessions_live", "Sessions that hold cached tokens",
                              MetricType::Gauge, labels_,
                              static_cast<double>(snapshot.live_sessions)));
    families.push_back(Single("nwor_staging_off_engines",
                              "Engines that decode without drafts after a fault", MetricType::Gauge,
                              labels_, static_cast<double>(snapshot.staging_off_engines)));
    families.push_back(
        Single("specpv_lossy_engines",
               "Engines that are NOT lossless: their tokens may differ from those of "
               "full attention",
               MetricType::Gauge, labels_, static_cast<double>(snapshot.lossy_engines)));
    families.push_back(Latency("nwor_commit_seconds", "Host time of a commit call",
                               snapshot.latency_buckets, snapshot.latency_sum_seconds, labels_));
    families.push_back(FullSteps(snapshot, labels_));
    families.push_back(DraftFailures(snapshot, labels_));
    for (int i = 0; i < kNumSummaries; ++i) {
      families.push_back(TokensOf(static_cast<Summary>(i), snapshot, labels_));
    }
    families.push_back(
        Latency("specpv_refresh_seconds",
                "Time of one layer's refresh; on a GPU, device time of sampled calls",
                snapshot.refresh_buckets, snapshot.refresh_sum_seconds, labels_));
    families.push_back(Build());
    families.push_back(Engine(snapshot.engine, labels_));
    AppendProcess(families);
    return families;
  }

 private:
  const Labels labels_;
};

// ---- the endpoint ------------------------------------------------------------------------------

// The mutex guards all fields. Never destroyed, so that exit does not wait for the server's thread.
struct Endpoint {
  std::mutex mutex;
  std::unique_ptr<HttpServer> server;
  std::string problem;
};

Endpoint& TheEndpoint() {
  static Endpoint* const endpoint = [] {
    // Before a fork the handlers run in reverse order of registration. StopMetrics holds the
    // endpoint's lock while a scrape may still take the counters' lock, so the fork must take the
    // endpoint's first: the counters register before it.
    Counters::Global();
    pthread_atfork([] { TheEndpoint().mutex.lock(); },  //
                   [] { TheEndpoint().mutex.unlock(); },
                   [] {
                     // The server's thread exists only in the parent, so the destructor would wait
                     // for ever: the object is leaked. Its sockets are closed: they would keep the
                     // port busy and clients waiting after the parent has ended.
                     Endpoint& self = TheEndpoint();
                     if (HttpServer* const inherited = self.server.release()) inherited->Abandon();
                     self.problem.clear();
                     self.mutex.unlock();
                   });
    return new Endpoint;
  }();
  return *endpoint;
}

// Returns null if nothing can listen at `address`; `problem` then says why.
std::unique_ptr<HttpServer> StartServer(const ListenAddress& address, std::string* problem) {
  // The constructor reads the environment, so it runs on this thread.
  const auto render = [source = std::make_shared<CountersCollectable>()] {
    return prometheus::TextSerializer().Serialize(source->Collect());
  };
  std::string why;
  auto server = HttpServer::Start(address, "/metrics", render, &why);
  if (!server) *problem = Concat("cannot serve metrics at ", address.Text(), ": ", why);
  return server;
}

}  // namespace

int ServeMetrics(const std::string& host, int port) {
  const ListenAddress address(host, port);
  Endpoint& endpoint = TheEndpoint();
  std::lock_guard lock(endpoint.mutex);
  const bool here = endpoint.server && endpoint.server->address().Host() == address.Host() &&
                    (port == 0 || endpoint.server->address().port() == port);
  if (here) {
    endpoint.problem.clear();
    return endpoint.server->address().port();
  }
  // The old and the new host cannot share the port if one of them is a wildcard, so the endpoint
  // stops before it moves.
  std::optional<ListenAddress> before;
  if (endpoint.server && endpoint.server->address().port() == port) {
    before = endpoint.server->address();
    endpoint.server.reset();
  }
  endpoint.problem.clear();
  if (auto server = StartServer(address, &endpoint.problem)) {
    endpoint.server = std::move(server);
    return endpoint.server->address().port();
  }
  std::string lost;
  if (before) endpoint.server = StartServer(*before, &lost);
  if (!lost.empty()) endpoint.problem += "; " + lost;
  return -1;
}

void StopMetrics() {
  Endpoint& endpoint = TheEndpoint();
  std::lock_guard lock(endpoint.mutex);
  endpoint.server.reset();
  endpoint.problem.clear();
}

ExporterStatus GetExporterStatus() {
  Endpoint& endpoint = TheEndpoint();
  std::lock_guard lock(endpoint.mutex);
  ExporterStatus status;
  status.built = true;
  status.problem = endpoint.problem;
  if (endpoint.server) {
    status.serving = true;
    status.host = endpoint.server->address().Host();
    status.port = endpoint.server->address().port();
  }
  return status;
}

std::string RenderMetrics() {
  return prometheus::TextSerializer().Serialize(CountersCollectable().Collect());
}

#else  // NWOR_WITH_PROMETHEUS

namespace {

constexpr char kNotBuilt[] =
    "metrics: this build has no Prometheus exporter; install prometheus-cpp "
    "(Debian: prometheus-cpp-dev) and build again";

}  // namespace

int ServeMetrics(const std::string& host, int port) {
  const ListenAddress checked(host, port);
  throw Error(kNotBuilt);
}
void StopMetrics() {}
ExporterStatus GetExporterStatus() { return {}; }
std::string RenderMetrics() { throw Error(kNotBuilt); }

#endif

}  // namespace nwor
