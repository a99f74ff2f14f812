#include "metrics/counters.h"

#include <pthread.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace nwor {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;

template <size_t kSize>
void Load(const std::array<std::atomic<int64_t>, kSize>& from, std::array<int64_t, kSize>& to) {
  for (size_t i = 0; i < kSize; ++i) to[i] = from[i].load(kRelaxed);
}

template <size_t kSize>
void Fold(const std::array<int64_t, kSize>& from, std::array<std::atomic<int64_t>, kSize>& to) {
  for (size_t i = 0; i < kSize; ++i) to[i].fetch_add(from[i], kRelaxed);
}

template <size_t kSize>
void Zero(std::array<std::atomic<int64_t>, kSize>& values) {
  for (auto& value : values) value.store(0, kRelaxed);
}

template <size_t kSize>
void Sum(const std::array<int64_t, kSize>& from, std::array<int64_t, kSize>& to) {
  for (size_t i = 0; i < kSize; ++i) to[i] += from[i];
}

int64_t Nanoseconds(double seconds) { return static_cast<int64_t>(std::llround(seconds * 1e9)); }

}  // namespace

Counters& Counters::Global() {
  static Counters* const counters = [] {
    auto* created = new Counters;
    // A forked child counts for itself: the parent reports the inherited totals, and the child
    // cannot read the parent's devices. The child does have its copy of the staging memory, so the
    // gauges stay. The lock keeps a fork from interrupting a read.
    pthread_atfork([] { Global().sources_mutex_.lock(); }, [] { Global().sources_mutex_.unlock(); },
                   [] {
                     Counters& self = Global();
                     Zero(self.values_);
                     Zero(self.fallbacks_);
                     Zero(self.commit_failures_);
                     Zero(self.latency_buckets_);
                     self.latency_sum_nanoseconds_.store(0, kRelaxed);
                     Zero(self.refresh_buckets_);
                     self.refresh_sum_nanoseconds_.store(0, kRelaxed);
                     Zero(self.full_steps_);
                     Zero(self.draft_failures_);
                     Zero(self.worker_calls_);
                     Zero(self.summary_sums_);
                     Zero(self.summary_counts_);
                     self.sources_.clear();
                     self.engine_.reset();
                     self.sources_mutex_.unlock();
                   });
    return created;
  }();
  return *counters;
}

namespace {

void ObserveLatency(double seconds,
                    std::array<std::atomic<int64_t>, kCommitLatencyBounds.size() + 1>& buckets,
                    std::atomic<int64_t>& sum_nanoseconds) {
  // Takes NaN for 0, too: a broken clock must not spoil the sum.
  if (!(seconds > 0)) seconds = 0;
  const auto bucket =
      std::lower_bound(kCommitLatencyBounds.begin(), kCommitLatencyBounds.end(), seconds) -
      kCommitLatencyBounds.begin();
  buckets[static_cast<size_t>(bucket)].fetch_add(1, kRelaxed);
  sum_nanoseconds.fetch_add(Nanoseconds(seconds), kRelaxed);
}

}  // namespace

void Counters::ObserveCommitLatency(double seconds) {
  ObserveLatency(seconds, latency_buckets_, latency_sum_nanoseconds_);
}

void Counters::ObserveRefreshLatency(double seconds) {
  ObserveLatency(seconds, refresh_buckets_, refresh_sum_nanoseconds_);
}

void Counters::RegisteredSource::Refresh() {
  // If the device can no longer be read, its last totals stay: counters never go backwards, and
  // nobody would catch an exception of the scrape thread.
  CountersSnapshot fresh;
  try {
    read(fresh);
  } catch (...) {
    fresh = last;
  }
  last = std::move(fresh);
}

void Counters::DescribeEngine(EngineInfo info) {
  std::lock_guard lock(sources_mutex_);
  engine_ = std::move(info);
}

int Counters::AddSource(Source source) {
  std::lock_guard lock(sources_mutex_);
  sources_.push_back({next_source_id_, std::move(source), {}});
  return next_source_id_++;
}

void Counters::RemoveSource(int id) {
  std::lock_guard lock(sources_mutex_);
  const auto found = std::find_if(sources_.begin(), sources_.end(),
                                  [id](const RegisteredSource& source) { return source.id == id; });
  if (found == sources_.end()) return;
  found->Refresh();
  Fold(found->last.values, values_);
  Fold(found->last.fallbacks, fallbacks_);
  Fold(found->last.commit_failures, commit_failures_);
  Fold(found->last.latency_buckets, latency_buckets_);
  latency_sum_nanoseconds_.fetch_add(Nanoseconds(found->last.latency_sum_seconds), kRelaxed);
  Fold(found->last.refresh_buckets, refresh_buckets_);
  refresh_sum_nanoseconds_.fetch_add(Nanoseconds(found->last.refresh_sum_seconds), kRelaxed);
  Fold(found->last.full_steps, full_steps_);
  Fold(found->last.draft_failures, draft_failures_);
  Fold(found->last.worker_calls, worker_calls_);
  Fold(found->last.summary_sums, summary_sums_);
  Fold(found->last.summary_counts, summary_counts_);
  // staging_bytes is a gauge: the memory goes with the source.
  sources_.erase(found);
}

CountersSnapshot Counters::Read() const {
  // The lock covers the loads of the own counts: a source that was removed between them and the
  // loop would count twice or not at all.
  std::lock_guard lock(sources_mutex_);
  CountersSnapshot snapshot;
  Load(values_, snapshot.values);
  Load(fallbacks_, snapshot.fallbacks);
  Load(commit_failures_, snapshot.commit_failures);
  Load(latency_buckets_, snapshot.latency_buckets);
  snapshot.latency_sum_seconds =
      static_cast<double>(latency_sum_nanoseconds_.load(kRelaxed)) * 1e-9;
  Load(refresh_buckets_, snapshot.refresh_buckets);
  snapshot.refresh_sum_seconds =
      static_cast<double>(refresh_sum_nanoseconds_.load(kRelaxed)) * 1e-9;
  Load(full_steps_, snapshot.full_steps);
  Load(draft_failures_, snapshot.draft_failures);
  Load(worker_calls_, snapshot.worker_calls);
  Load(summary_sums_, snapshot.summary_sums);
  Load(summary_counts_, snapshot.summary_counts);
  snapshot.staging_bytes = staging_bytes_.load(kRelaxed);
  snapshot.live_sessions = live_sessions_.load(kRelaxed);
  snapshot.lossy_engines = lossy_engines_.load(kRelaxed);
  snapshot.staging_off_engines = staging_off_engines_.load(kRelaxed);
  snapshot.engine = engine_;
  for (RegisteredSource& source : sources_) {
    source.Refresh();
    Sum(source.last.values, snapshot.values);
    Sum(source.last.fallbacks, snapshot.fallbacks);
    Sum(source.last.commit_failures, snapshot.commit_failures);
    Sum(source.last.latency_buckets, snapshot.latency_buckets);
    snapshot.latency_sum_seconds += source.last.latency_sum_seconds;
    Sum(source.last.refresh_buckets, snapshot.refresh_buckets);
    snapshot.refresh_sum_seconds += source.last.refresh_sum_seconds;
    Sum(source.last.full_steps, snapshot.full_steps);
    Sum(source.last.draft_failures, snapshot.draft_failures);
    Sum(source.last.worker_calls, snapshot.worker_calls);
    Sum(source.last.summary_sums, snapshot.summary_sums);
    Sum(source.last.summary_counts, snapshot.summary_counts);
    snapshot.staging_bytes += source.last.staging_bytes;
  }
  return snapshot;
}

}  // namespace nwor
