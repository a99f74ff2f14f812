#include "kv_interceptor/interceptor.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "check.h"
#include "kv_interceptor/agreement.h"
#include "kv_interceptor/commit_fault.h"
#include "kv_interceptor/digest.h"
#include "kv_interceptor/kv_ops.h"
#include "kv_interceptor/round.h"
#include "kv_interceptor/tensor_layout.h"
#include "profiling.h"

namespace nwor {
namespace {

// One layer's rows of a write with the staging row of each.
struct RowsToWrite {
  std::vector<int32_t> stage_rows;  // -1: direct
  std::vector<int32_t> staged;      // those that are not
};

RowsToWrite ChooseRows(const std::vector<int32_t>& stage_rows_of_batch,
                       const std::optional<std::vector<int32_t>>& rows) {
  RowsToWrite chosen;
  if (!rows.has_value()) {
    chosen.stage_rows = stage_rows_of_batch;
  } else {
    const auto num_rows = static_cast<int32_t>(stage_rows_of_batch.size());
    std::vector<bool> seen(num_rows, false);
    for (const int32_t row : *rows) {
      NWOR_CHECK(row >= 0 && row < num_rows, "rows: got row ", row, ", expected 0 to ",
                 num_rows - 1);
      NWOR_CHECK(!seen[row], "rows: got row ", row, " twice, expected each row once in a write");
      seen[row] = true;
      chosen.stage_rows.push_back(stage_rows_of_batch[row]);
    }
  }
  std::copy_if(chosen.stage_rows.begin(), chosen.stage_rows.end(),
               std::back_inserter(chosen.staged), [](int32_t row) { return row >= 0; });
  return chosen;
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

struct Interceptor::Impl {
  explicit Impl(NworConfig config_in)
      : config(std::move(config_in)), enabled(config.enable_nwor), books(config.strict) {}

  const NworConfig config;
  bool enabled;
  LayerTable table;
  RoundBooks books;

  // The open round, or the last one.
  bool round_open = false;
  bool staging = false;
  int64_t epoch = 0;
  RoundPlan plan;
  RoundTables rows;
  at::Tensor round_status;  // faults that writes of the round found on the device

  CommitUndoLog undo;
  // On CUDA: whether commits of the open round count there, and have settled its books there.
  bool counts_on_device = false;
  bool capturing = false;
  at::Tensor fixed_tables;  // with graph_rows: where every round's tables stand
  bool settled_on_device = false;
  CacheWriter* writer = &PlainCacheWriter();
  InterceptorObserver* observer = nullptr;

  Outcome Bypass(BoundLayer* layer, BypassReason reason, std::string_view detail);
  Outcome Write(const WriteCall& call, std::optional<int64_t> call_epoch);
  Outcome WriteLayer(BoundLayer& layer, const WriteCall& call);
  BypassReason CheckSlotsOnCpu(const BoundLayer& layer, const StageParams& params,
                               const RowsToWrite& rows, std::string* detail) const;

  CommitParams DescribeCommit(const CommitCall& call, at::Tensor& status) const;
  bool FindIncomplete(std::string* detail) const;
  void Commit(const CommitCall& call, Receipt* receipt);
  // The ranks' digests of this commit; with `refuse` this rank makes all of them disagree.
  at::Tensor Agree(const CommitParams& params, bool refuse) const;
  void CommitOnCpu(const CommitParams& params, Receipt* receipt);
  void CommitOnCuda(CommitParams& params, bool last);
  int64_t StagedTokens() const;
  void CloseRound(bool aborted);
};

Interceptor::Interceptor(NworConfig config) {
  NWOR_CHECK(config.staging_rows >= 0, "staging_rows: got ", config.staging_rows,
             ", expected 0 or more");
  NWOR_CHECK(config.graph_rows >= 0 && config.graph_rows <= INT32_MAX / 8, "graph_rows: got ",
             config.graph_rows, ", expected 0 to ", INT32_MAX / 8);
  NWOR_CHECK(config.max_staging_bytes > 0, "max_staging_bytes: got ", config.max_staging_bytes,
             ", expected more than 0");
  impl_ = std::make_unique<Impl>(std::move(config));
}

Interceptor::~Interceptor() = default;

void Interceptor::BindLayer(const std::string& name, const at::Tensor& key_cache,
                            const at::Tensor& value_cache, int group,
                            const std::optional<at::Tensor>& k_scale,
                            const std::optional<at::Tensor>& v_scale,
                            std::optional<at::ScalarType> dtype) {
  NWOR_CHECK(!impl_->round_open, "bind_layer: got layer '", name,
             "' while a round is open, expected commit or abort first");
  const BoundLayer& layer =
      impl_->table.Bind(name, key_cache, value_cache, group, k_scale, v_scale, dtype);
  if (layer.ready && layer.key_cache.is_cuda()) impl_->books.UseDevice(layer.key_cache.device());
  if (!layer.unsupported.empty()) {
    impl_->books.Report(BypassReason::kUnsupportedLayout,
                        Concat("layer '", name, "': ", layer.unsupported));
  }
}

Decision Interceptor::Begin(const RoundPlan& plan, bool capture) {
  Impl& impl = *impl_;
  const int64_t graph_rows = impl.config.graph_rows;
  NWOR_CHECK(!capture || graph_rows > 0,
             "capture: got a round to capture, expected graph_rows above 0 in the configuration");
  NWOR_CHECK(!impl.round_open, "begin: got a second round while round ", impl.epoch,
             " is open, expected commit or abort first");
  CheckPlan(plan);
  impl.table.CheckConsistent();
  const int64_t num_drafts = plan.num_draft_rows();
  Decision decision;
  std::string detail;
  if (!impl.enabled) {
    decision.reason = BypassReason::kDisabled;
  } else if (num_drafts > 0 && !impl.table.any_ready()) {
    decision.reason = BypassReason::kNotReady;
  } else if (num_drafts > 0) {
    const int64_t before = impl.table.staging_bytes();
    // Staging that captured graphs know must not move: it does not grow.
    const int64_t rows = graph_rows > 0 ? impl.config.staging_rows : num_drafts;
    decision.stage = num_drafts <= rows && impl.table.Reserve(rows, impl.config.staging_rows,
                                                              impl.config.max_staging_bytes);
    impl.books.CountStagingBytes(impl.table.staging_bytes() - before);
    if (!decision.stage) {
      decision.reason = BypassReason::kCapacity;
      detail = Concat("got ", num_drafts, " draft rows, expected what fits into ",
                      impl.config.max_staging_bytes, " bytes");
      if (graph_rows > 0) detail += Concat(" and staging_rows = ", impl.config.staging_rows);
    }
  }
  if (decision.reason != BypassReason::kNone && !capture) {
    impl.books.Report(decision.reason, detail);
  }

  const at::Device device = impl.table.device();
  const auto on_device = at::TensorOptions().device(device);
  if (graph_rows > 0 && (!impl.fixed_tables.defined() || impl.fixed_tables.device() != device)) {
    impl.fixed_tables = at::empty({RoundTables::FixedWords(graph_rows)}, on_device.dtype(at::kInt));
    impl.round_status = at::zeros({kNumStatusWords}, on_device.dtype(at::kLong));
  }
  impl.rows = RoundTables(plan, decision.stage, device, impl.fixed_tables, graph_rows);
  impl.plan = plan;
  impl.staging = decision.stage;
  if (decision.stage) {
    for (const CacheGroup& group : impl.table.groups()) {
      if (group.staging != nullptr) group.staging->BeginRound(num_drafts);
    }
    if (graph_rows > 0) {
      impl.round_status.zero_();
    } else {
      impl.round_status = at::zeros({kNumStatusWords}, on_device.dtype(at::kLong));
    }
  }
  for (BoundLayer& layer : impl.table.layers()) layer.round = LayerRound::kSilent;
  impl.counts_on_device = impl.settled_on_device = false;
  impl.round_open = true;
  impl.capturing = capture;
  decision.epoch = ++impl.epoch;
  if (impl.observer != nullptr && !capture) impl.observer->AfterBegin(plan, decision);
  return decision;
}

// ---- write
// ---------------------------------------------------------------------------------------

Outcome Interceptor::Write(const std::string& layer, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& slot_mapping,
                           const std::optional<std::vector<int32_t>>& rows,
                           std::optional<int64_t> epoch) {
  const WriteCall call{layer, key, value, slot_mapping, rows};
  const bool observed = impl_->observer != nullptr && !impl_->capturing;
  if (observed) impl_->observer->BeforeWrite(call);
  const Outcome outcome = impl_->Write(call, epoch);
  if (observed) impl_->observer->AfterWrite(call, outcome);
  return outcome;
}

Outcome Interceptor::Impl::Bypass(BoundLayer* layer, BypassReason reason, std::string_view detail) {
  books.Report(reason, detail);
  if (layer != nullptr) layer->round = LayerRound::kBypassed;
  return {Action::kBypass, reason, 0};
}

Outcome Interceptor::Impl::Write(const WriteCall& call, std::optional<int64_t> call_epoch) {
  NWOR_CHECK(call.key.defined() && call.value.defined() && call.slot_mapping.defined(),
             "key, value, slot_mapping: got nothing, expected tensors");
  const std::string name = Concat("layer '", call.layer, "'");
  BoundLayer* layer = table.Find(call.layer);
  if (layer == nullptr) return Bypass(nullptr, BypassReason::kUnboundLayer, name);
  if (IsFake(call.key) || IsFake(call.value) || IsFake(call.slot_mapping)) {
    return Bypass(nullptr, BypassReason::kFakeTensor, name);
  }
  if (call_epoch.has_value() && (*call_epoch != epoch || !round_open)) {
    return Bypass(nullptr, BypassReason::kStaleRound,
                  Concat("got a write of round ", *call_epoch, ", the last one is ", epoch));
  }
  NWOR_CHECK(round_open, "write: got rows of ", name, " without an open round, expected begin");
  if (!enabled) return Bypass(layer, BypassReason::kDisabled, "");
  if (!layer->unsupported.empty()) {
    return Bypass(layer, BypassReason::kUnsupportedLayout, Concat(name, ": ", layer->unsupported));
  }
  if (!layer->ready) return Bypass(layer, BypassReason::kNotReady, name);
  return WriteLayer(*layer, call);
}

Outcome Interceptor::Impl::WriteLayer(BoundLayer& layer, const WriteCall& call) {
  const CacheGroup& group = table.groups()[layer.group];
  StagingBuffer& staging_buffer = *group.staging;
  const at::Device device = staging_buffer.device();
  const CacheGeometry& geometry = layer.layout.geometry;

  const RowsToWrite chosen = ChooseRows(rows.stage_rows(), call.rows);
  const auto num_rows = static_cast<int64_t>(chosen.stage_rows.size());
  at::Tensor key = ContiguousChannels(call.key), value = ContiguousChannels(call.value);
  at::Tensor slot_mapping = call.slot_mapping;
  if (config.graph_rows > 0 && !call.rows.has_value()) {
    for (at::Tensor* padded : {&key, &value, &slot_mapping}) {
      if (padded->dim() > 0 && padded->size(0) > num_rows) *padded = padded->narrow(0, 0, num_rows);
    }
  }

  StageParams params;
  params.rows = DescribeRows(key, value, "key", "value", geometry.num_heads, geometry.head_dim);
  NWOR_CHECK(key.size(0) == num_rows, "key: got ", key.size(0), " rows, expected ", num_rows,
             call.rows.has_value() ? " as rows" : " as the round's plan");
  NWOR_CHECK(key.scalar_type() == group.dtype, "key: got dtype ", c10::toString(key.scalar_type()),
             ", expected ", c10::toString(group.dtype), " as the other rows of the group");
  CheckDevice(key, "key", device);
  CheckIndex(slot_mapping, "slot_mapping", at::kLong, {num_rows}, device);

  at::Tensor chosen_on_device;
  if (call.rows.has_value()) {
    chosen_on_device = ToDevice(chosen.stage_rows, device);
    params.stage_rows = static_cast<const int32_t*>(chosen_on_device.const_data_ptr());
  } else {
    params.stage_rows = rows.device_stage_rows();
  }
  params.cache = layer.layout;
  params.slot_mapping = static_cast<const int64_t*>(slot_mapping.const_data_ptr());
  params.num_rows = static_cast<int32_t>(num_rows);
  params.dtype = RowDType(key, "key");
  params.exclusive = true;
  params.stream = CurrentStream(device);
  if (staging) {
    params.staged = staging_buffer.LayerView(layer.staged_layer);
    // A graph may be replayed with more drafts than it was captured with.
    params.num_staging_rows = config.graph_rows > 0
                                  ? static_cast<int32_t>(staging_buffer.capacity_rows())
                                  : rows.num_staging_rows();
    params.group_slots = static_cast<int64_t*>(staging_buffer.slots().mutable_data_ptr());
    params.status = static_cast<int64_t*>(round_status.mutable_data_ptr());
  }

  int64_t num_direct = num_rows - static_cast<int64_t>(chosen.staged.size());
  if (device.is_cpu()) {
    std::string detail;
    const BypassReason problem = CheckSlotsOnCpu(layer, params, chosen, &detail);
    if (problem != BypassReason::kNone) {
      const Outcome outcome = Bypass(&layer, problem, detail);
      // As on a GPU: when layers disagree about slots the round commits nothing, or a token would
      // be in one layer and not in another.
      params.status[kStatusCode] = static_cast<int64_t>(CommitError::kSlotMismatch);
      return outcome;
    }
    for (int64_t i = 0; i < num_rows; ++i) {
      num_direct -= chosen.stage_rows[i] < 0 && params.slot_mapping[i] < 0 ? 1 : 0;
    }
  }
  {
    const c10::DeviceGuard guard(device);
    const ScopedProfileRange range(ProfileRange::kStage);
    if (device.is_cpu()) {
      StageCpu(params);
    } else {
#ifdef NWOR_WITH_CUDA
      LaunchStage(params);
#endif
    }
  }

  Outcome outcome{staging ? Action::kStage : Action::kDirect, BypassReason::kNone, 0};
  if (capturing) return outcome;
  if (staging) {
    outcome.staged_rows = staging_buffer.MarkStaged(layer.staged_layer, chosen.staged);
  }
  layer.round = staging ? LayerRound::kStaged : LayerRound::kDirect;
  books.CountWrite(num_direct * layer.bytes_per_token(), !chosen.staged.empty());
  return outcome;
}

// On the CPU the data is at hand: wrong slots are found before anything is written.
BypassReason Interceptor::Impl::CheckSlotsOnCpu(const BoundLayer& layer, const StageParams& params,
                                                const RowsToWrite& chosen,
                                                std::string* detail) const {
  CheckStageOnCpu(params);
  if (params.group_slots == nullptr) return BypassReason::kNone;
  for (int32_t i = 0; i < params.num_rows; ++i) {
    const int32_t row = chosen.stage_rows[i];
    if (row < 0) continue;
    const int64_t recorded = params.group_slots[row];
    if (recorded == kNoSlot || recorded == params.slot_mapping[i]) continue;
    *detail = Concat("layer '", layer.name, "' gave slot ", params.slot_mapping[i],
                     " for a draft row that has slot ", recorded, " in another layer of group ",
                     layer.group);
    return BypassReason::kSlotMismatch;
  }
  return BypassReason::kNone;
}

// ---- commit
// --------------------------------------------------------------------------------------

Receipt Interceptor::Commit(const at::Tensor& path, const at::Tensor& counts,
                            const std::vector<at::Tensor>& slots, RowSpace rows, bool last,
                            const SummaryTensors& summaries) {
  Impl& impl = *impl_;
  NWOR_CHECK(impl.round_open && !impl.capturing,
             "commit: got no open round, expected begin and writes first");
  const auto started = std::chrono::steady_clock::now();
  const CommitCall call{path, counts, slots, rows, last, summaries};
  const at::Device device = impl.table.device();
  const int64_t num_requests = impl.rows.num_requests();
  CheckIndex(path, "path", at::kInt, {num_requests, -1}, device);
  CheckIndex(counts, "counts", at::kInt, {num_requests}, device);
  NWOR_CHECK(path.numel() <= kMaxCommitRows, "path: got ", path.numel(),
             " entries, expected at most ", kMaxCommitRows, ": commit in chunks");
  NWOR_CHECK(slots.empty() || static_cast<int>(slots.size()) == impl.table.num_staging_groups(),
             "slots: got ", slots.size(), " tensors, expected one for each of the ",
             impl.table.num_staging_groups(), " cache groups");
  for (const at::Tensor& group_slots : slots) {
    CheckIndex(group_slots, "slots", at::kLong, {num_requests, path.size(1)}, device);
  }

  Receipt receipt;
  receipt.epoch = impl.epoch;
  receipt.status = at::zeros({kNumStatusWords}, at::dtype(at::kLong).device(device));
  if (impl.staging) {
    const c10::DeviceGuard guard(device);
    const ScopedProfileRange range(ProfileRange::kCommit);
    impl.Commit(call, &receipt);
  }
  if (last) impl.CloseRound(/*aborted=*/false);
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - started;
  Counters::Global().ObserveCommitLatency(elapsed.count());
  if (impl.observer != nullptr) impl.observer->AfterCommit(call, receipt);
  return receipt;
}

// A layer that bypassed did its own write; every other layer must have staged every draft row, or
// the commit would lose some.
bool Interceptor::Impl::FindIncomplete(std::string* detail) const {
  for (const BoundLayer& layer : table.layers()) {
    if (!layer.ready || layer.round == LayerRound::kBypassed) continue;
    const int64_t missing = table.groups()[layer.group].staging->MissingRows(layer.staged_layer);
    if (missing == 0) continue;
    *detail = Concat("layer '", layer.name, "' lacks ", missing, " of ", rows.num_staging_rows(),
                     " draft rows");
    return true;
  }
  return false;
}

CommitParams Interceptor::Impl::DescribeCommit(const CommitCall& call, at::Tensor& status) const {
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
  params.parents = rows.parents();
  params.tips = rows.tips();
  params.round_status = static_cast<const int64_t*>(round_status.const_data_ptr());
  params.status = static_cast<int64_t*>(status.mutable_data_ptr());
  params.bytes_per_token = table.staged_bytes_per_token();
  params.stream = CurrentStream(table.device());

  std::vector<int> group_index(table.groups().size(), -1);
  for (size_t g = 0; g < table.groups().size(); ++g) {
    const CacheGroup& source = table.groups()[g];
    if (source.staging == nullptr) continue;
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

void Interceptor::Impl::Commit(const CommitCall& call, Receipt* receipt) {
  std::string detail;
  const bool incomplete = FindIncomplete(&detail);
  CommitParams params = DescribeCommit(call, receipt->status);
  if (!incomplete) {
    params.summaries =
        DescribeSummaries(call.summaries, params, rows.num_requests(), table.device());
  }
  at::Tensor agreement;
  if (!config.agreement_group.empty()) {
    // Every rank asks before it looks at its own input, so that none waits for one that gave up.
    agreement = Agree(params, incomplete);
    params.agreement = static_cast<const int64_t*>(agreement.const_data_ptr());
  }
  if (incomplete) {
    receipt->degraded = BypassReason::kIncompleteStaging;
    receipt->status[kStatusCode].fill_(static_cast<int64_t>(CommitError::kIncompleteStaging));
    receipt->problem = books.Report(BypassReason::kIncompleteStaging, detail);
  } else if (table.device().is_cpu()) {
    CommitOnCpu(params, receipt);
  } else {
    CommitOnCuda(params, call.last);
  }
}

at::Tensor Interceptor::Impl::Agree(const CommitParams& params, bool refuse) const {
  at::Tensor digest = at::full({2}, kDigestRefusal, at::dtype(at::kLong).device(table.device()));
  auto* words = static_cast<int64_t*>(digest.mutable_data_ptr());
  if (!refuse && table.device().is_cpu()) {
    CommitDigestCpu(params, words);
  } else if (!refuse) {
#ifdef NWOR_WITH_CUDA
    LaunchCommitDigest(params, words);
#endif
  }
  AgreeOnDigest(config.agreement_group, digest);
  return digest;
}

void Interceptor::Impl::CommitOnCpu(const CommitParams& params, Receipt* receipt) {
  CommitVerdict verdict = ValidateCommit(params);
  NWOR_CHECK(!IsInputFault(verdict.error), ExplainInputFault(verdict, params));
  verdict = CommitCpu(params, undo, *writer);
  if (verdict.error == CommitError::kSlotMismatch) {
    receipt->degraded = BypassReason::kSlotMismatch;  // counted when the write fell back
    receipt->problem = Sentence(verdict.error);
  } else if (verdict.error == CommitError::kRankDisagreement) {
    receipt->degraded = BypassReason::kRankDisagreement;
    receipt->problem = books.Report(receipt->degraded, "nothing was written on any rank");
  } else if (verdict.error == CommitError::kWriteFailed) {
    // Staging is intact and every byte is back: write the accepted rows once more from there.
    verdict = CommitCpu(params, undo, *writer);
    receipt->degraded = verdict.error == CommitError::kOk ? BypassReason::kCommitFailure
                                                          : BypassReason::kCommitLost;
    receipt->problem = books.Report(receipt->degraded, "");
  }
  books.CountCommit(params.status[kStatusCommitted], params.bytes_per_token);
}

void Interceptor::Impl::CommitOnCuda(CommitParams& params, bool last) {
#ifdef NWOR_WITH_CUDA
  params.ticket = books.DeviceTicket();
  params.counters = books.DeviceCounters();
  params.closing_tokens = last ? StagedTokens() : -1;
  LaunchCommit(params);
  counts_on_device = true;
  settled_on_device = last;
#endif
}

void Interceptor::NoteReplay() {
  Impl& impl = *impl_;
  NWOR_CHECK(impl.round_open && !impl.capturing && impl.config.graph_rows > 0,
             "note_replay: got no open round of an interceptor with graph_rows, expected one");
  std::vector<int32_t> staged(impl.rows.num_staging_rows());
  std::iota(staged.begin(), staged.end(), 0);
  for (BoundLayer& layer : impl.table.layers()) {
    if (!layer.ready) continue;
    NWOR_CHECK(layer.round == LayerRound::kSilent, "note_replay: layer '", layer.name,
               "' has been written in this round, expected no write");
    if (impl.staging) {
      impl.table.groups()[layer.group].staging->MarkStaged(layer.staged_layer, staged);
    }
    layer.round = impl.staging ? LayerRound::kStaged : LayerRound::kDirect;
    const auto num_direct = impl.rows.num_rows() - static_cast<int64_t>(staged.size());
    impl.books.CountWrite(num_direct * layer.bytes_per_token(), !staged.empty());
  }
}

void Interceptor::Abort() {
  NWOR_CHECK(impl_->round_open, "abort: got no open round, expected begin first");
  if (impl_->capturing) {
    impl_->round_open = impl_->capturing = false;
    return;
  }
  impl_->CloseRound(/*aborted=*/true);
  if (impl_->observer != nullptr) impl_->observer->AfterAbort();
}

// A token counts once, whichever layers of whichever groups have staged it.
int64_t Interceptor::Impl::StagedTokens() const {
  std::vector<bool> staged(rows.num_staging_rows(), false);
  for (const CacheGroup& group : table.groups()) {
    if (staging && group.staging != nullptr) group.staging->AddStagedRows(staged);
  }
  return std::count(staged.begin(), staged.end(), true);
}

void Interceptor::Impl::CloseRound(bool aborted) {
  if (counts_on_device && !settled_on_device) {
    // Chunks were committed and the rest was given up: an empty commit settles the books there.
    const c10::DeviceGuard guard(table.device());
    const at::Tensor none = at::zeros({1, 1}, at::dtype(at::kInt).device(table.device()));
    const at::Tensor no_slots = at::zeros({1, 1}, at::dtype(at::kLong).device(table.device()));
    at::Tensor status = at::zeros({kNumStatusWords}, no_slots.options());
    const std::vector<at::Tensor> slots(table.num_staging_groups(), no_slots);
    CommitParams params = DescribeCommit({none, none, slots, RowSpace::kBatch, true, {}}, status);
    params.num_requests = 0;
    CommitOnCuda(params, /*last=*/true);
  }
  books.CloseRound(StagedTokens(), table.staged_bytes_per_token(), aborted, counts_on_device);
  round_open = false;
}

// ---- the rest
// ------------------------------------------------------------------------------------

void Interceptor::SetEnabled(bool enabled, BypassReason reason) {
  NWOR_CHECK(!impl_->round_open, "set_enabled: got a call while round ", impl_->epoch,
             " is open, expected commit or abort first");
  const bool switched_off = impl_->enabled && !enabled;
  impl_->enabled = enabled;
  if (switched_off) impl_->books.Report(reason, "switched off at run time");
}

void Interceptor::ReportBypass(BypassReason reason, std::string_view detail) {
  NWOR_CHECK(reason != BypassReason::kNone, "reason: got none, expected why the host bypassed");
  impl_->books.Report(reason, detail);
}

Interceptor::Stats Interceptor::stats() const {
  Stats stats = impl_->books.Read();
  stats.num_layers = static_cast<int>(impl_->table.layers().size());
  stats.num_groups = impl_->table.num_staging_groups();
  stats.epoch = impl_->epoch;
  stats.round_open = impl_->round_open;
  return stats;
}

Mode Interceptor::mode() const { return impl_->enabled ? Mode::kStage : Mode::kDisabled; }
const NworConfig& Interceptor::config() const { return impl_->config; }
void Interceptor::SetLogSink(LogSink sink) { impl_->books.SetLogSink(std::move(sink)); }
void Interceptor::SetCacheWriter(CacheWriter* writer) {
  impl_->writer = writer == nullptr ? &PlainCacheWriter() : writer;
}
void Interceptor::SetObserver(InterceptorObserver* observer) { impl_->observer = observer; }
const std::vector<Interceptor::LayerInfo>& Interceptor::layers() const {
  return impl_->table.layers();
}

Interceptor::RoundInfo Interceptor::round() const {
  return {impl_->round_open, impl_->staging, impl_->epoch, impl_->plan, impl_->rows.stage_rows()};
}

const StagingBuffer* Interceptor::staging(int group) const {
  const std::vector<CacheGroup>& groups = impl_->table.groups();
  NWOR_CHECK(group >= 0 && group < static_cast<int>(groups.size()), "group: got ", group,
             ", expected 0 to ", static_cast<int>(groups.size()) - 1);
  return groups[group].staging.get();
}

}  // namespace nwor
