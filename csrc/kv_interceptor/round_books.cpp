#include "kv_interceptor/round_books.h"

#include <ATen/ops/zeros.h>

#include "check.h"
#include "kv_interceptor/commit.h"

namespace nwor {

RoundBooks::RoundBooks(bool strict) : strict_(strict) {
  source_id_ = Counters::Global().AddSource(
      [this](CountersSnapshot& snapshot) { AddDeviceTotals(snapshot); });
}

RoundBooks::~RoundBooks() {
  Counters::Global().RemoveSource(source_id_);
  Counters::Global().AddStagingBytes(-totals_.staging_bytes);
}

std::string RoundBooks::Report(BypassReason reason, std::string_view detail) {
  Counters::Global().AddFallback(reason);
  {
    const std::lock_guard lock(mutex_);
    ++totals_.fallbacks[static_cast<size_t>(reason)];
  }
  std::string message(Sentence(reason));
  if (!detail.empty()) message += Concat(": ", detail);
  if (log_sink_ && logged_.insert(reason).second) log_sink_(reason, message);
  NWOR_CHECK(!strict_ || reason == BypassReason::kDisabled, Label(reason), ": ", message);
  return message;
}

void RoundBooks::CountWrite(int64_t direct_bytes, bool staged) {
  Counters::Global().Add(Counter::kCacheBytesWritten, direct_bytes);
  if (staged) Counters::Global().Add(Counter::kStageOperations, 1);
  const std::lock_guard lock(mutex_);
  totals_.cache_bytes_written += direct_bytes;
  totals_.stage_operations += staged ? 1 : 0;
}

void RoundBooks::CountCommit(int64_t tokens, int64_t bytes_per_token) {
  Counters::Global().Add(Counter::kCommittedTokens, tokens);
  Counters::Global().Add(Counter::kCacheBytesWritten, tokens * bytes_per_token);
  const std::lock_guard lock(mutex_);
  open_committed_ += tokens;
  totals_.committed_tokens += tokens;
  totals_.cache_bytes_written += tokens * bytes_per_token;
}

void RoundBooks::CountStagingBytes(int64_t delta) {
  Counters::Global().AddStagingBytes(delta);
  const std::lock_guard lock(mutex_);
  totals_.staging_bytes += delta;
}

int64_t* RoundBooks::DeviceCounters(at::Device device) {
  const std::lock_guard lock(mutex_);
  if (!device_counters_.defined()) {
    device_counters_ = at::zeros({kNumCommitCounters}, at::dtype(at::kLong).device(device));
  }
  return static_cast<int64_t*>(device_counters_.mutable_data_ptr());
}

void RoundBooks::CloseRound(int64_t tokens, int64_t bytes_per_token, bool aborted, bool on_device) {
  Counters& counters = Counters::Global();
  counters.Add(Counter::kRounds, 1);
  if (aborted) counters.Add(Counter::kAbortedRounds, 1);
  counters.Add(Counter::kStagedTokens, tokens);
  const std::lock_guard lock(mutex_);
  ++totals_.rounds;
  totals_.aborted_rounds += aborted ? 1 : 0;
  totals_.staged_tokens += tokens;
  if (on_device) {
    device_staged_tokens_ += tokens;
    device_staged_bytes_ += tokens * bytes_per_token;
    return;
  }
  const int64_t rejected = tokens - open_committed_;
  open_committed_ = 0;
  counters.Add(Counter::kRejectedTokens, rejected);
  counters.Add(Counter::kCacheBytesAvoided, rejected * bytes_per_token);
  totals_.rejected_tokens += rejected;
  totals_.cache_bytes_avoided += rejected * bytes_per_token;
}

InterceptorStats RoundBooks::Read() const {
  CountersSnapshot device;
  AddDeviceTotals(device);
  const std::lock_guard lock(mutex_);
  InterceptorStats stats = totals_;
  stats.committed_tokens += device[Counter::kCommittedTokens];
  stats.rejected_tokens += device[Counter::kRejectedTokens];
  stats.cache_bytes_written += device[Counter::kCacheBytesWritten];
  stats.cache_bytes_avoided += device[Counter::kCacheBytesAvoided];
  return stats;
}

// What the device has committed of the rounds that were closed: the rest of them was rejected.
void RoundBooks::AddDeviceTotals(CountersSnapshot& snapshot) const {
  at::Tensor on_device;
  int64_t staged_tokens = 0, staged_bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    if (!device_counters_.defined() && device_staged_tokens_ == 0) return;
    on_device = device_counters_;
    staged_tokens = device_staged_tokens_;
    staged_bytes = device_staged_bytes_;
  }
  int64_t tokens = 0, bytes = 0;
  if (on_device.defined()) {
    const at::Tensor host = on_device.cpu();
    const auto* words = static_cast<const int64_t*>(host.const_data_ptr());
    tokens = words[kCounterCommittedTokens];
    bytes = words[kCounterCommittedBytes];
  }
  const auto add = [&](Counter counter, int64_t amount) {
    snapshot.values[static_cast<size_t>(counter)] += amount;
  };
  add(Counter::kCommittedTokens, tokens);
  add(Counter::kRejectedTokens, staged_tokens - tokens);
  add(Counter::kCacheBytesWritten, bytes);
  add(Counter::kCacheBytesAvoided, staged_bytes - bytes);
}

}  // namespace nwor
