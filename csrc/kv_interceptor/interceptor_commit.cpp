#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"
#include "base/profiling.h"
#include "base/tensor_layout.h"
#include "kv_interceptor/commit/agreement.h"
#include "kv_interceptor/commit/digest.h"
#include "kv_interceptor/commit/fault.h"
#include "kv_interceptor/commit/path.h"
#include "kv_interceptor/interceptor_impl.h"

namespace nwor {
namespace {

// visit(request, index, group, slot) for every accepted row. REQUIRES: the commit is valid.
template <typename Visit>
void ForEachDestination(const CommitParams& params, const Visit& visit) {
  for (int32_t request = 0; request < params.num_requests; ++request) {
    for (int32_t index = 0; index < params.counts[request]; ++index) {
      const int32_t row = StagingRow(params, request, index);
      for (int group = 0; group < params.num_groups; ++group) {
        visit(request, index, group, DestinationSlot(params, group, request, index, row));
      }
    }
  }
}

}  // namespace

CommitVerdict Receipt::verdict() const {
  const at::Tensor host = status.cpu();
  const auto* words = static_cast<const int64_t*>(host.const_data_ptr());
  return {static_cast<CommitError>(words[kStatusCode]), words[kStatusRequest], words[kStatusIndex],
          words[kStatusValue]};
}

bool Receipt::ok() const {
  return degraded != BypassReason::kCommitLost && verdict().error == CommitError::kOk;
}

int64_t Receipt::committed_tokens() const {
  const at::Tensor host = status.cpu();
  return static_cast<const int64_t*>(host.const_data_ptr())[kStatusCommitted];
}

Receipt Interceptor::Commit(const at::Tensor& path, const at::Tensor& counts,
                            const std::vector<at::Tensor>& slots, RowSpace rows, bool last,
                            const TailTensors& tail) {
  RankAnswer answer(impl_->config.agreement_group);
  try {
    return impl_->Commit({path, counts, slots, rows, last, tail}, answer);
  } catch (...) {
    answer.Refuse(impl_->table.device());
    throw;
  }
}

void Interceptor::Impl::CheckCommit(const CommitCall& call) const {
  NWOR_CHECK(open, "commit: no round is open; call begin and write first");
  NWOR_CHECK(!open->capturing, "commit: the open round is being captured; end it with abort");
  const at::Device device = table.device();
  const int64_t num_requests = open->rows.num_requests();
  CheckIndex(call.path, "path", at::kInt, {num_requests, -1}, device);
  CheckIndex(call.counts, "counts", at::kInt, {num_requests}, device);
  NWOR_CHECK(call.path.numel() <= kMaxCommitRows, "path: got ", call.path.numel(),
             " entries, expected at most ", kMaxCommitRows, ": commit in chunks");
  NWOR_CHECK(
      call.slots.empty() || static_cast<int>(call.slots.size()) == table.num_staging_groups(),
      "slots: got ", call.slots.size(), " tensors, expected one for each of the ",
      table.num_staging_groups(), " cache groups");
  for (const at::Tensor& group_slots : call.slots) {
    CheckIndex(group_slots, "slots", at::kLong, {num_requests, call.path.size(1)}, device);
  }
}

Receipt Interceptor::Impl::Commit(const CommitCall& call, RankAnswer& answer) {
  const auto started = std::chrono::steady_clock::now();
  CheckCommit(call);
  const at::Device device = table.device();
  Receipt receipt;
  receipt.epoch = open->epoch;
  const auto words = at::dtype(at::kLong).device(device);
  // A commit on a GPU writes all of it.
  receipt.status = open->staging && device.is_cuda() ? at::empty({kNumStatusWords}, words)
                                                     : at::zeros({kNumStatusWords}, words);
  DoDeferred(*open);
  if (open->staging) {
    const c10::DeviceGuard guard(device);
    const ScopedProfileRange range(ProfileRange::kCommit);
    CommitStaged(call, answer, &receipt);
  } else if (answer.owed()) {
    const c10::DeviceGuard guard(device);
    CommitDirect(answer, &receipt);
  }
  if (call.last) CloseRound(/*aborted=*/false);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - started;
  Counters::Global().ObserveCommitLatency(elapsed.count());
  if (observer != nullptr) observer->AfterCommit(call, receipt);
  return receipt;
}

// A layer that bypassed did its own write; every other layer must have staged every draft row, or
// the commit would lose some.
bool Interceptor::Impl::FindIncomplete(std::string* detail) const {
  for (const BoundLayer& layer : table.layers()) {
    if (!layer.ready || layer.round == LayerRound::kBypassed) continue;
    const int64_t missing = table.groups()[layer.group].staging->MissingRows(layer.staged_layer);
    if (missing == 0) continue;
    *detail = Concat("layer '", layer.name, "' lacks ", missing, " of ",
                     open->rows.num_staging_rows(), " draft rows");
    return true;
  }
  return false;
}

CommitParams Interceptor::Impl::DescribeCommit(const CommitCall& call, at::Tensor& status) const {
  const RoundTables& rows = open->rows;
  CommitParams params;
  params.path = static_cast<const int32_t*>(call.path.const_data_ptr());
  params.counts = static_cast<const int32_t*>(call.counts.const_data_ptr());
  params.num_requests = rows.num_requests();
  params.depth = static_cast<int32_t>(call.path.size(1));
  params.num_staging_rows = rows.num_staging_rows();
  params.row_base = call.rows == RowSpace::kRequest ? rows.row_base() : nullptr;
  params.row_map = rows.device_stage_rows();
  params.num_map_rows = rows.num_rows();
  params.request_rows = rows.request_rows();
  params.parents = open->plan.ascending ? nullptr : rows.parents();
  params.tips = rows.tips();
  params.round_status = static_cast<int64_t*>(open->status.mutable_data_ptr());
  params.status = static_cast<int64_t*>(status.mutable_data_ptr());
  params.bytes_per_token = table.staged_bytes_per_token();
  params.stream = CurrentStream(table.device());

  std::vector<int> group_index(table.groups().size(), -1);
  for (size_t g = 0; g < table.groups().size(); ++g) {
    const CacheGroup& source = table.groups()[g];
    if (source.num_ready == 0) continue;
    CommitGroup& group = params.groups[params.num_groups];
    group.staged = source.staging->LayerView(0);
    group.staged_key_layer = source.staging->keys().stride(0);
    group.staged_value_layer = source.staging->values().stride(0);
    group.row_slots = static_cast<const int64_t*>(source.staging->slots().const_data_ptr());
    if (!call.slots.empty()) {
      group.slots = static_cast<const int64_t*>(call.slots[params.num_groups].const_data_ptr());
    }
    group.geometry = source.geometry;
    group.dtype = RowDType(source.staging->keys(), "staging");
    group_index[g] = params.num_groups++;
  }
  for (const BoundLayer& layer : table.layers()) {
    if (layer.round != LayerRound::kStaged) continue;
    params.layers[params.num_layers++] = {layer.layout.key, layer.layout.value, layer.layout.scales,
                                          group_index[layer.group], layer.staged_layer};
  }
  return params;
}

void Interceptor::Impl::CommitStaged(const CommitCall& call, RankAnswer& answer, Receipt* receipt) {
  std::string detail;
  const bool incomplete = FindIncomplete(&detail);
  CommitParams params = DescribeCommit(call, receipt->status);
  if (!incomplete) {
    params.tail = DescribeTail(call.tail, params, params.num_requests, table.device());
  }
  CommitVerdict found;
  if (!incomplete && table.device().is_cpu()) found = ValidateOnCpu(params);
  const bool fault = found.error != CommitError::kOk;
  at::Tensor agreement;
  if (answer.owed()) {
    // A rank asks also with a fault of its own, so that no other waits for it or writes without it.
    agreement = Agree(params, incomplete || fault, answer);
    // Its own fault is then the one to tell.
    if (!fault) params.agreement = static_cast<const int64_t*>(agreement.const_data_ptr());
  }
  if (incomplete) {
    books.CountFailure(CommitError::kIncompleteStaging);
    receipt->degraded = BypassReason::kIncompleteStaging;
    receipt->status.zero_();
    receipt->status[kStatusCode].fill_(static_cast<int64_t>(CommitError::kIncompleteStaging));
    receipt->problem = books.Report(BypassReason::kIncompleteStaging, detail);
  } else if (table.device().is_cpu()) {
    CommitOnCpu(params, found, call.last, receipt);
  } else {
    CommitOnCuda(params, call.last);
  }
}

at::Tensor Interceptor::Impl::Agree(const CommitParams& params, bool refuse,
                                    RankAnswer& answer) const {
  at::Tensor digest = at::full({2}, kDigestRefusal, at::dtype(at::kLong).device(table.device()));
  auto* words = static_cast<int64_t*>(digest.mutable_data_ptr());
  if (!refuse && table.device().is_cpu()) {
    CommitDigestCpu(params, words);
  } else if (!refuse) {
#ifdef NWOR_WITH_CUDA
    LaunchCommitDigest(params, words);
#endif
  }
  answer.Give(digest);
  return digest;
}

// Its rows are in the cache already; whether they count is up to all ranks.
void Interceptor::Impl::CommitDirect(RankAnswer& answer, Receipt* receipt) {
  at::Tensor digest = at::full({2}, kDigestDirect, receipt->status.options());
  digest[1].bitwise_not_();
  answer.Give(digest);
  const at::Tensor differs = digest[0].ne(digest[1].bitwise_not());
  receipt->status[kStatusCode].add_(differs, static_cast<int>(CommitError::kRankDisagreement));
  receipt->status[kStatusValue].add_(digest[0].mul(differs));
  if (table.device().is_cuda() || !differs.item<bool>()) return;
  books.CountFailure(CommitError::kRankDisagreement);
  ReportDisagreement(receipt);
}

void Interceptor::Impl::ReportDisagreement(Receipt* receipt) {
  receipt->degraded = BypassReason::kRankDisagreement;
  receipt->problem = books.Report(receipt->degraded, "nothing was committed on any rank");
}

CommitVerdict Interceptor::Impl::ValidateOnCpu(const CommitParams& params) const {
  const CommitVerdict verdict = ValidateCommit(params);
  const auto& chunks = open->committed_slots;
  if (verdict.error != CommitError::kOk || chunks.empty()) return verdict;
  CommitVerdict repeated;
  ForEachDestination(params, [&](int32_t request, int32_t index, int group, int64_t slot) {
    if (repeated.error != CommitError::kOk || chunks[group].count(slot) == 0) return;
    repeated = {CommitError::kDuplicateSlot, request, index, slot};
  });
  return repeated;
}

void Interceptor::Impl::CommitOnCpu(const CommitParams& params, const CommitVerdict& found,
                                    bool is_last, Receipt* receipt) {
  if (found.error != CommitError::kOk) books.CountFailure(found.error);
  NWOR_CHECK(!IsInputFault(found.error), ExplainInputFault(found, params));
  CommitVerdict verdict = CommitCpu(params, undo, *writer);
  const bool failed = verdict.error == CommitError::kWriteFailed;
  if (failed || (found.error == CommitError::kOk && verdict.error != CommitError::kOk)) {
    books.CountFailure(verdict.error);
  }
  // Staging is intact and every byte is back: write the accepted rows once more from there.
  if (failed) verdict = CommitCpu(params, undo, *writer);
  if (verdict.error == CommitError::kOk && !is_last) {
    open->committed_slots.resize(params.num_groups);
    ForEachDestination(params, [&](int32_t, int32_t, int group, int64_t slot) {
      open->committed_slots[group].insert(slot);
    });
  }
  // Before anything is reported, which throws if strict: what is in the cache counts.
  if (verdict.error == CommitError::kOk) {
    books.CountCommit(params.status[kStatusCommitted], params.bytes_per_token);
  }
  if (verdict.error == CommitError::kSlotMismatch) {
    receipt->degraded = BypassReason::kSlotMismatch;  // counted when the write fell back
    receipt->problem = Sentence(verdict.error);
  } else if (verdict.error == CommitError::kRankDisagreement) {
    ReportDisagreement(receipt);
  } else if (failed) {
    receipt->degraded = verdict.error == CommitError::kOk ? BypassReason::kCommitFailure
                                                          : BypassReason::kCommitLost;
    receipt->problem = books.Report(receipt->degraded, "");
  }
}

void Interceptor::Impl::CommitOnCuda(CommitParams& params, bool is_last) {
#ifdef NWOR_WITH_CUDA
  params.ticket = books.DeviceTicket();
  params.counters = books.DeviceCounters();
  params.closing_tokens = is_last ? StagedTokens() : -1;
  // Tips are -1 before and after a round's only commit. Without them no block waits for others.
  if (is_last && open->device_commits != DeviceCommits::kInChunks) params.tips = nullptr;
  LaunchCommit(params);
  open->device_commits = is_last ? DeviceCommits::kSettled : DeviceCommits::kInChunks;
#endif
}

void Interceptor::Abort() {
  NWOR_CHECK(impl_->open, "abort: no round is open; call begin first");
  impl_->open->deferred.clear();
  if (impl_->open->capturing) return impl_->EndRound(/*clean=*/false);
  impl_->CloseRound(/*aborted=*/true);
  if (impl_->observer != nullptr) impl_->observer->AfterAbort();
}

// A token counts once, whichever layers of whichever groups have staged it.
int64_t Interceptor::Impl::StagedTokens() const {
  std::vector<bool> staged(open->rows.num_staging_rows(), false);
  for (const CacheGroup& group : table.groups()) {
    if (open->staging && group.staging != nullptr) group.staging->AddStagedRows(staged);
  }
  return std::count(staged.begin(), staged.end(), true);
}

void Interceptor::Impl::CloseRound(bool aborted) {
  const bool clean = config.graph_rows > 0 && open->device_commits == DeviceCommits::kSettled;
  if (open->device_commits == DeviceCommits::kInChunks) {
    // Chunks were committed and the rest was given up: an empty commit settles the books there.
    const c10::DeviceGuard guard(table.device());
    const at::Tensor none = at::zeros({1, 1}, at::dtype(at::kInt).device(table.device()));
    const at::Tensor no_slots = at::zeros({1, 1}, at::dtype(at::kLong).device(table.device()));
    at::Tensor status = at::zeros({kNumStatusWords}, no_slots.options());
    const std::vector<at::Tensor> slots(table.num_staging_groups(), no_slots);
    CommitParams params = DescribeCommit({none, none, slots, RowSpace::kBatch, true, {}}, status);
    params.num_requests = 0;
    CommitOnCuda(params, /*is_last=*/true);
  }
  books.CloseRound(StagedTokens(), table.staged_bytes_per_token(), aborted,
                   open->device_commits != DeviceCommits::kNone);
  EndRound(clean);
}

void Interceptor::Impl::EndRound(bool clean) {
  last = {std::move(open->plan), std::move(open->rows), open->staging, clean};
  open.reset();
  books.SetRound(epoch, /*open=*/false);
}

}  // namespace nwor
