#include "kv_interceptor/round_books.h"

#include <ATen/ops/zeros.h>

#include <utility>

#include "base/check.h"
#include "kv_interceptor/commit/commit.h"

#ifdef NWOR_WITH_CUDA
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace nwor {
namespace {

#ifdef NWOR_WITH_CUDA
bool Capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}
#endif

// A copy on the host, read on a stream of its own.
at::Tensor ReadAside(const at::Tensor& words) {
#ifdef NWOR_WITH_CUDA
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const c10::cuda::CUDAStreamGuard aside(
      c10::cuda::getStreamFromPool(/*isHighPriority=*/false, words.device().index()));
#endif
  return words.cpu();
}

// A copy on the host, read behind everything that this thread has enqueued; aside while it captures
// a graph, since then nothing runs yet.
at::Tensor ReadInOrder(const at::Tensor& words) {
#ifdef NWOR_WITH_CUDA
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  const c10::cuda::CUDAGuard guard(words.device());
  if (!Capturing()) return words.cpu();
#endif
  return ReadAside(words);
}

// Waits for all streams of the device, unless this thread captures a graph, which that would break.
// The process may be ending: a device that is gone has nothing left to tell.
void WaitForDevice(at::Device device) noexcept {
#ifdef NWOR_WITH_CUDA
  try {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
    const c10::cuda::CUDAGuard guard(device);
    if (!Capturing()) c10::cuda::device_synchronize();
  } catch (const std::exception&) {
    return;
  }
#endif
}

}  // namespace

RoundBooks::RoundBooks(bool strict) : strict_(strict) {
  source_id_ = Counters::Global().AddSource(
      [this](CountersSnapshot& snapshot) { AddDeviceTotals(snapshot, /*in_order=*/false); });
}

RoundBooks::~RoundBooks() {
  // The last totals are folded into the process's counters, so they must be the last ones: other
  // streams are waited for, and this thread's own is what they are read on.
  if (device_words_.defined()) WaitForDevice(device_words_.device());
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
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
  open_failed_ = false;
  totals_.committed_tokens += tokens;
  totals_.cache_bytes_written += tokens * bytes_per_token;
}

void RoundBooks::CountFailure(CommitError error) {
  Counters::Global().AddCommitFailure(error);
  const std::lock_guard lock(mutex_);
  ++totals_.commit_failures[static_cast<size_t>(error)];
  open_failed_ = true;
}

void RoundBooks::SetStagingBytes(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  Counters::Global().AddStagingBytes(bytes - totals_.staging_bytes);
  totals_.staging_bytes = bytes;
}

void RoundBooks::SetLayers(int num_layers, int num_groups) {
  const std::lock_guard lock(mutex_);
  totals_.num_layers = num_layers;
  totals_.num_groups = num_groups;
}

void RoundBooks::SetRound(int64_t epoch, bool open) {
  const std::lock_guard lock(mutex_);
  totals_.epoch = epoch;
  totals_.round_open = open;
}

void RoundBooks::UseDevice(at::Device device) {
  const std::lock_guard lock(mutex_);
  if (device_words_.defined() && device_words_.device() == device) return;
  const at::Tensor zeros = at::zeros({kNumCommitCounters + 1}, at::kLong);
  device_words_ = zeros.to(device);  // blocking: readers are on other streams
}

int64_t* RoundBooks::DeviceCounters() const {
  return static_cast<int64_t*>(device_words_.mutable_data_ptr());
}

uint32_t* RoundBooks::DeviceTicket() const {
  return reinterpret_cast<uint32_t*>(DeviceCounters() + kNumCommitCounters);
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
  const bool failed = std::exchange(open_failed_, false);
  if (on_device) return;
  const int64_t rest = tokens - std::exchange(open_committed_, 0);
  const int64_t rejected = failed ? 0 : rest;
  counters.Add(Counter::kFailedTokens, rest - rejected);
  totals_.failed_tokens += rest - rejected;
  counters.Add(Counter::kRejectedTokens, rejected);
  counters.Add(Counter::kCacheBytesAvoided, rejected * bytes_per_token);
  totals_.rejected_tokens += rejected;
  totals_.cache_bytes_avoided += rejected * bytes_per_token;
}

InterceptorStats RoundBooks::Read() const {
  CountersSnapshot device;
  AddDeviceTotals(device, /*in_order=*/true);
  const std::lock_guard lock(mutex_);
  InterceptorStats stats = totals_;
  stats.committed_tokens += device[Counter::kCommittedTokens];
  stats.rejected_tokens += device[Counter::kRejectedTokens];
  stats.failed_tokens += device[Counter::kFailedTokens];
  stats.cache_bytes_written += device[Counter::kCacheBytesWritten];
  stats.cache_bytes_avoided += device[Counter::kCacheBytesAvoided];
  for (int error = 0; error < kNumCommitErrors; ++error) {
    stats.commit_failures[error] += device.commit_failures[error];
  }
  return stats;
}

void RoundBooks::AddDeviceTotals(CountersSnapshot& snapshot, bool in_order) const {
  at::Tensor words;
  {
    const std::lock_guard lock(mutex_);
    words = device_words_;
    in_order |= closing_;
  }
  if (!words.defined()) return;
  const at::Tensor host = in_order ? ReadInOrder(words) : ReadAside(words);
  const auto* totals = static_cast<const int64_t*>(host.const_data_ptr());
  const auto add = [&](Counter counter, int64_t amount) {
    snapshot.values[static_cast<size_t>(counter)] += amount;
  };
  add(Counter::kCommittedTokens, totals[kCounterCommittedTokens]);
  add(Counter::kRejectedTokens, totals[kCounterRejectedTokens]);
  add(Counter::kFailedTokens, totals[kCounterFailedTokens]);
  add(Counter::kCacheBytesWritten, totals[kCounterCommittedBytes]);
  add(Counter::kCacheBytesAvoided, totals[kCounterRejectedBytes]);
  for (int error = 1; error < kNumCommitErrors; ++error) {  // after kOk
    snapshot.commit_failures[error] += totals[kCounterOutcomes + error];
  }
}

}  // namespace nwor
