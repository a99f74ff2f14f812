#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

#include "base/bypass_reason.h"
#include "metrics/counters.h"

// What one interceptor has done, in numbers: its own totals and its share of the process-wide
// counters. For every closed round staged = committed + rejected + failed. Tokens have failed if a
// commit of their round was refused or failed.
//
// Commits on a GPU are counted there (commit/counters.h); the books ask the device when somebody
// reads, on a stream of their own, so that reading neither waits for a round nor disturbs a
// capture.
//
// Thread-safety: Read may be called from any thread, the rest from the round's thread.

namespace nwor {

struct InterceptorStats {
  int64_t rounds = 0, aborted_rounds = 0, stage_operations = 0;
  int64_t staged_tokens = 0, committed_tokens = 0, rejected_tokens = 0, failed_tokens = 0;
  int64_t cache_bytes_written = 0, cache_bytes_avoided = 0, staging_bytes = 0;
  std::array<int64_t, kNumBypassReasons> fallbacks{};
  std::array<int64_t, kNumCommitErrors> commit_failures{};
  int num_layers = 0, num_groups = 0;
  int64_t epoch = 0;
  bool round_open = false;
};

class RoundBooks {
 public:
  using LogSink = std::function<void(BypassReason, std::string_view message)>;

  explicit RoundBooks(bool strict);
  ~RoundBooks();
  RoundBooks(const RoundBooks&) = delete;
  RoundBooks& operator=(const RoundBooks&) = delete;

  void SetLogSink(LogSink sink) { log_sink_ = std::move(sink); }

  // Counts a bypass, logs the first of its kind and returns the message. When strict, anything but
  // "disabled" throws it instead.
  std::string Report(BypassReason reason, std::string_view detail);

  void CountWrite(int64_t direct_bytes, bool staged);
  void CountCommit(int64_t tokens, int64_t bytes_per_token);  // on the CPU
  // A commit that the host knows to have failed. What is left of its round has failed, too, unless
  // a later commit succeeds.
  void CountFailure(CommitError error);

  // What the interceptor is and does now, for readers on other threads.
  void SetStagingBytes(int64_t bytes);
  void SetLayers(int num_layers, int num_groups);
  void SetRound(int64_t epoch, bool open);

  // Makes the words below on `device`, once, and waits until they are zero. REQUIRES: no capture.
  void UseDevice(at::Device device);
  int64_t* DeviceCounters() const;  // int64[kNumCommitCounters]
  uint32_t* DeviceTicket() const;   // see CommitParams::ticket

  // Settles a round that staged `tokens` tokens. `on_device`: its commits settle the rejected ones.
  void CloseRound(int64_t tokens, int64_t bytes_per_token, bool aborted, bool on_device);

  // Waits for what this thread has enqueued on the device, so that its own rounds are all in.
  InterceptorStats Read() const;

 private:
  // `in_order`: behind what this thread has enqueued, instead of on a stream of its own.
  void AddDeviceTotals(CountersSnapshot& snapshot, bool in_order) const;

  const bool strict_;
  LogSink log_sink_;
  std::set<BypassReason> logged_;

  mutable std::mutex mutex_;  // guards what follows
  InterceptorStats totals_;
  int64_t open_committed_ = 0;  // tokens of the open round, CPU
  bool open_failed_ = false;    // a commit of the open round failed
  at::Tensor device_words_;     // int64: the counters, then the ticket
  bool closing_ = false;        // the next reading is the last one
  int source_id_ = 0;
};

}  // namespace nwor
