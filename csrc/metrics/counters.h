#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bypass_reason.h"
#include "base/call_outcome.h"
#include "base/commit_error.h"
#include "base/draft_failure.h"
#include "base/export.h"
#include "base/full_trigger.h"

// Counters of the hot path: relaxed atomics, nothing else. The exporter and stats() read them.
//
// Commits on a GPU count on the device. A source that is registered here adds those totals when
// somebody reads, so a round never waits for the device.

namespace nwor {

// X(enumerator, metric name, help)
#define NWOR_COUNTERS(X)                                                                          \
  X(kStageOperations, "nwor_stage_operations_total", "Layer writes that staged at least one row") \
  X(kStagedTokens, "nwor_staged_tokens_total",                                                    \
    "Draft tokens staged; a token counts once per round, not once per layer")                     \
  X(kCommittedTokens, "nwor_committed_tokens_total", "Draft tokens committed to the cache")       \
  X(kRejectedTokens, "nwor_rejected_tokens_total",                                                \
    "Draft tokens rejected; their K/V never reached the cache")                                   \
  X(kFailedTokens, "nwor_failed_tokens_total",                                                    \
    "Draft tokens that a refused or failed commit left uncommitted, accepted or not")             \
  X(kRounds, "nwor_rounds_total", "Verification rounds that ended, committed or aborted")         \
  X(kAbortedRounds, "nwor_aborted_rounds_total", "Verification rounds that were aborted")         \
  X(kCacheBytesWritten, "nwor_cache_bytes_written_total",                                         \
    "Bytes written to paged caches by direct writes and commits")                                 \
  X(kCacheBytesAvoided, "nwor_cache_bytes_avoided_total",                                         \
    "Bytes of rejected draft tokens that were not written to paged caches")                       \
  X(kRecoveries, "nwor_recoveries_total",                                                         \
    "Times that running requests were computed again after a commit failed")                      \
  X(kContractViolations, "nwor_contract_violations_total",                                        \
    "Contract violations that the checker reported")                                              \
  X(kChunkRows, "nwor_chunk_rows_total", "Rows that chunked verification ran")                    \
  X(kChunkRowsSaved, "nwor_chunk_rows_saved_total",                                               \
    "Rows of draft chains that chunked verification did not run")                                 \
  X(kSessionsStarted, "nwor_sessions_started_total", "Sessions started")                          \
  X(kSessionsEnded, "nwor_sessions_ended_total", "Sessions ended by their clients")               \
  X(kSessionsEvicted, "nwor_sessions_evicted_total", "Sessions evicted to make room")             \
  X(kSessionsExpired, "nwor_sessions_expired_total", "Sessions removed because they were idle")   \
  X(kSessionDesyncs, "nwor_session_desyncs_total",                                                \
    "Verify calls refused: client and session disagreed about the cached length")                 \
  X(kSessionHits, "nwor_session_cache_hits_total", "Verify calls whose session was cached")       \
  X(kSessionMisses, "nwor_session_cache_misses_total",                                            \
    "Verify calls whose session was new or unknown")                                              \
  X(kWorkerBytesReceived, "nwor_worker_bytes_received_total", "Bytes of messages from clients")   \
  X(kWorkerBytesSent, "nwor_worker_bytes_sent_total", "Bytes of messages to clients")             \
  X(kWorkerCallTime, "nwor_worker_call_seconds_total", "Time from calls to their answers")        \
  X(kWorkerWaitTime, "nwor_worker_wait_seconds_total", "Part of it that calls waited their turn") \
  X(kPartialSteps, "specpv_partial_steps_total", "Verification steps over a partial view")        \
  X(kKvBytesRead, "specpv_kv_bytes_read_total", "K/V bytes that steps read")                      \
  X(kKvBytesFull, "specpv_kv_bytes_full_total",                                                   \
    "K/V bytes that the same steps would have read if all were full")                             \
  X(kRecheckedTokens, "specpv_rechecked_tokens_total",                                            \
    "Tokens emitted by partial steps that full attention checked again")                          \
  X(kDisagreedTokens, "specpv_disagreed_tokens_total",                                            \
    "Rechecked tokens that full attention would have chosen differently")                         \
  X(kDraftPasses, "specpv_draft_passes_total",                                                    \
    "Draft passes of the target model over partial views")                                        \
  X(kDraftedTokens, "specpv_drafted_tokens_total",                                                \
    "Tokens that the target model drafted over partial views")                                    \
  X(kConfirmedTokens, "specpv_confirmed_tokens_total",                                            \
    "Tokens drafted over partial views that a full step confirmed")                               \
  X(kPlainSteps, "specpv_plain_steps_total", "Steps that verified no drafts")                     \
  X(kPlainTokens, "specpv_plain_step_tokens_total", "Tokens of timed plain steps")                \
  X(kPlainTime, "specpv_plain_step_seconds_total", "Time of timed plain steps")                   \
  X(kGuessSteps, "specpv_guess_steps_total", "Steps that verified guesses alone")                 \
  X(kGuessTokens, "specpv_guess_step_tokens_total", "Tokens of timed steps with guesses alone")   \
  X(kGuessTime, "specpv_guess_step_seconds_total", "Time of timed steps with guesses alone")      \
  X(kPassSteps, "specpv_pass_steps_total", "Steps that verified drafts of partial passes")        \
  X(kPassTokens, "specpv_pass_step_tokens_total", "Tokens of timed steps with partial passes")    \
  X(kPassTime, "specpv_pass_step_seconds_total", "Time of timed steps with partial passes")       \
  X(kArmSwitches, "specpv_arm_switches_total",                                                    \
    "Changes of the choice between plain steps, guesses and numbers of passes")                   \
  X(kProbeSteps, "specpv_probe_steps_total", "Steps that tried another choice than the best one") \
  X(kProbedRows, "specpv_probed_rows_total",                                                      \
    "Rows of full steps whose attention was also computed over the partial view")                 \
  X(kDeviatingRows, "specpv_deviating_rows_total",                                                \
    "Probed rows whose output the partial view changed noticeably")

enum class Counter : int {
#define NWOR_ENUMERATOR(name, metric, help) name,
  NWOR_COUNTERS(NWOR_ENUMERATOR)
#undef NWOR_ENUMERATOR
};

struct CounterText {
  const char* metric;
  const char* help;

  // What a counter's 1 is in the unit of its name: counters of seconds count microseconds.
  constexpr double Unit() const {
    return std::string_view(metric).ends_with("_seconds_total") ? 1e-6 : 1.0;
  }
};
inline constexpr std::array kCounterTexts = {
#define NWOR_TEXT(name, metric, help) CounterText{metric, help},
    NWOR_COUNTERS(NWOR_TEXT)
#undef NWOR_TEXT
};
inline constexpr int kNumCounters = static_cast<int>(kCounterTexts.size());

// Sum and count of a quantity that every partial step has.
// X(enumerator, metric name without suffix, help)
#define NWOR_SUMMARIES(X)                                                       \
  X(kViewTokens, "specpv_view_tokens", "Tokens that a partial step attends to") \
  X(kContextTokens, "specpv_context_tokens", "Tokens in the context of a partial step")

enum class Summary : int {
#define NWOR_ENUMERATOR(name, metric, help) name,
  NWOR_SUMMARIES(NWOR_ENUMERATOR)
#undef NWOR_ENUMERATOR
};
inline constexpr std::array kSummaryTexts = {
#define NWOR_TEXT(name, metric, help) CounterText{metric, help},
    NWOR_SUMMARIES(NWOR_TEXT)
#undef NWOR_TEXT
};
inline constexpr int kNumSummaries = static_cast<int>(kSummaryTexts.size());

// Upper bounds of the latency histograms (commit, refresh) in seconds; the last bucket is +Inf.
inline constexpr std::array<double, 12> kCommitLatencyBounds = {2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4,
                                                                2e-4, 5e-4, 1e-3, 5e-3, 2e-2, 1e-1};

// What an engine does: the labels of nwor_engine_info.
struct EngineInfo {
  std::string drafter;       // the host's name for it: "ngram", "eagle3"
  std::string draft_tokens;  // most draft tokens in a step
  std::string mode;          // "full", or a mode of partial verification
  std::string attention;     // the route of verify attention, "auto" by default
};

// A copy for readers. Each number is exact; numbers may be from slightly different moments.
struct CountersSnapshot {
  std::array<int64_t, kNumCounters> values{};
  std::array<int64_t, kNumBypassReasons> fallbacks{};                      // by BypassReason
  std::array<int64_t, kNumCommitErrors> commit_failures{};                 // by CommitError
  std::array<int64_t, kCommitLatencyBounds.size() + 1> latency_buckets{};  // not cumulative
  double latency_sum_seconds = 0;
  std::array<int64_t, kCommitLatencyBounds.size() + 1> refresh_buckets{};
  double refresh_sum_seconds = 0;
  std::array<int64_t, kNumFullTriggers> full_steps{};       // by FullTrigger
  std::array<int64_t, kNumDraftFailures> draft_failures{};  // by DraftFailure
  std::array<int64_t, kNumCallOutcomes> worker_calls{};     // by CallOutcome
  std::array<int64_t, kNumSummaries> summary_sums{};
  std::array<int64_t, kNumSummaries> summary_counts{};
  int64_t staging_bytes = 0;
  int64_t live_sessions = 0;
  int64_t lossy_engines = 0;
  int64_t staging_off_engines = 0;
  std::optional<EngineInfo> engine;  // the newest one

  int64_t operator[](Counter counter) const { return values[static_cast<size_t>(counter)]; }
};

// Thread-safety: every method may be called from any thread.
class NWOR_EXPORT Counters {
 public:
  // The process-wide counters that the exporter serves. Never destroyed. A forked child starts at
  // zero, without sources and engine; only the gauges carry over.
  static Counters& Global();

  void Add(Counter counter, int64_t amount) {
    values_[static_cast<size_t>(counter)].fetch_add(amount, std::memory_order_relaxed);
  }
  void AddFallback(BypassReason reason) {
    fallbacks_[static_cast<size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
  }
  void AddCommitFailure(CommitError error) {
    commit_failures_[static_cast<size_t>(error)].fetch_add(1, std::memory_order_relaxed);
  }
  void AddStagingBytes(int64_t delta) {
    staging_bytes_.fetch_add(delta, std::memory_order_relaxed);
  }
  void AddLiveSessions(int64_t delta) {
    live_sessions_.fetch_add(delta, std::memory_order_relaxed);
  }
  void AddLossyEngines(int64_t delta) {
    lossy_engines_.fetch_add(delta, std::memory_order_relaxed);
  }
  void AddStagingOffEngines(int64_t delta) {
    staging_off_engines_.fetch_add(delta, std::memory_order_relaxed);
  }
  void AddFullStep(FullTrigger trigger) {
    full_steps_[static_cast<size_t>(trigger)].fetch_add(1, std::memory_order_relaxed);
  }
  void AddDraftFailure(DraftFailure reason) {
    draft_failures_[static_cast<size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
  }
  void AddWorkerCall(CallOutcome outcome) {
    worker_calls_[static_cast<size_t>(outcome)].fetch_add(1, std::memory_order_relaxed);
  }
  void Observe(Summary summary, int64_t amount) {
    summary_sums_[static_cast<size_t>(summary)].fetch_add(amount, std::memory_order_relaxed);
    summary_counts_[static_cast<size_t>(summary)].fetch_add(1, std::memory_order_relaxed);
  }
  void ObserveCommitLatency(double seconds);
  void ObserveRefreshLatency(double seconds);

  // Describes the newest engine of this process; replaces the description of an earlier one.
  void DescribeEngine(EngineInfo info);

  // A source adds totals that are kept elsewhere (on a device) to a snapshot that starts at zero.
  // It may block on the device. If it throws, its last totals stay valid.
  // AddSource returns an id for RemoveSource. RemoveSource waits for a running read and adds the
  // source's last totals to the counters, so that they never go backwards. It ignores unknown ids.
  // REQUIRES: a source calls no method of these Counters that reads or changes sources.
  using Source = std::function<void(CountersSnapshot&)>;
  int AddSource(Source source);
  void RemoveSource(int id);

  CountersSnapshot Read() const;

 private:
  std::array<std::atomic<int64_t>, kNumCounters> values_{};
  std::array<std::atomic<int64_t>, kNumBypassReasons> fallbacks_{};
  std::array<std::atomic<int64_t>, kNumCommitErrors> commit_failures_{};
  std::array<std::atomic<int64_t>, kCommitLatencyBounds.size() + 1> latency_buckets_{};
  std::atomic<int64_t> latency_sum_nanoseconds_{0};
  std::array<std::atomic<int64_t>, kCommitLatencyBounds.size() + 1> refresh_buckets_{};
  std::atomic<int64_t> refresh_sum_nanoseconds_{0};
  std::array<std::atomic<int64_t>, kNumFullTriggers> full_steps_{};
  std::array<std::atomic<int64_t>, kNumDraftFailures> draft_failures_{};
  std::array<std::atomic<int64_t>, kNumCallOutcomes> worker_calls_{};
  std::array<std::atomic<int64_t>, kNumSummaries> summary_sums_{};
  std::array<std::atomic<int64_t>, kNumSummaries> summary_counts_{};
  std::atomic<int64_t> staging_bytes_{0};
  std::atomic<int64_t> live_sessions_{0};
  std::atomic<int64_t> lossy_engines_{0};
  std::atomic<int64_t> staging_off_engines_{0};

  struct RegisteredSource {
    int id;
    Source read;
    CountersSnapshot last;

    void Refresh();
  };

  mutable std::mutex sources_mutex_;               // guards the fields below
  mutable std::vector<RegisteredSource> sources_;  // mutable: Read() stores their last totals
  std::optional<EngineInfo> engine_;
  int next_source_id_ = 1;
};

}  // namespace nwor
