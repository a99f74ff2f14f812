#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/profiling.h"
#include "base/tensor_layout.h"
#include "kv_interceptor/interceptor_impl.h"
#include "kv_interceptor/kv_ops.h"

namespace nwor {
namespace {

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

Outcome Interceptor::Write(const std::string& layer, const at::Tensor& key, const at::Tensor& value,
                           const at::Tensor& slot_mapping,
                           const std::optional<std::vector<int32_t>>& rows,
                           std::optional<int64_t> epoch, bool defer) {
  const WriteCall call{layer, key, value, slot_mapping, rows};
  const bool captured = impl_->open && impl_->open->capturing;
  const bool observed = impl_->observer != nullptr && !captured;
  if (observed) impl_->observer->BeforeWrite(call);
  // An observer looks at the bytes as soon as the write returns.
  const Outcome outcome = impl_->Write(call, epoch, defer && !observed && !rows.has_value());
  if (observed) impl_->observer->AfterWrite(call, outcome);
  return outcome;
}

std::optional<DeferredWrite> Interceptor::TakeDeferred(const std::string& layer) {
  if (!impl_->open) return std::nullopt;
  auto node = impl_->open->deferred.extract(layer);
  if (node.empty()) return std::nullopt;
  return std::move(node.mapped());
}

void Interceptor::ReturnDeferred(const std::string& layer, DeferredWrite write) {
  if (!impl_->open || write.epoch != impl_->open->epoch) return;
  impl_->open->deferred.insert_or_assign(layer, std::move(write));
}

void Interceptor::Impl::Stage(const StageParams& params, at::Device device) {
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

void Interceptor::Impl::DoDeferred(OpenRound& round) {
  for (auto& [layer, write] : round.deferred) {
    write.params.stream = CurrentStream(table.device());
    Stage(write.params, table.device());
  }
  round.deferred.clear();
}

Outcome Interceptor::Impl::Bypass(BoundLayer* layer, BypassReason reason, std::string_view detail) {
  books.Report(reason, detail);
  if (layer != nullptr) layer->round = LayerRound::kBypassed;
  return {Action::kBypass, reason, 0};
}

Outcome Interceptor::Impl::Write(const WriteCall& call, std::optional<int64_t> call_epoch,
                                 bool defer) {
  NWOR_CHECK(call.key.defined() && call.value.defined() && call.slot_mapping.defined(),
             "key, value, slot_mapping: got nothing, expected tensors");
  const std::string name = Concat("layer '", call.layer, "'");
  BoundLayer* layer = table.Find(call.layer);
  if (layer == nullptr) return Bypass(nullptr, BypassReason::kUnboundLayer, name);
  if (IsFake(call.key) || IsFake(call.value) || IsFake(call.slot_mapping)) {
    return Bypass(nullptr, BypassReason::kFakeTensor, name);
  }
  if (call_epoch.has_value() && (!open || *call_epoch != epoch)) {
    return Bypass(
        nullptr, BypassReason::kStaleRound,
        Concat("the write belongs to round ", *call_epoch, ", but the last round is ", epoch));
  }
  NWOR_CHECK(open, "write: no round is open for rows of ", name, "; call begin first");
  if (!enabled) return Bypass(layer, BypassReason::kDisabled, "");
  if (!layer->unsupported.empty()) {
    return Bypass(layer, BypassReason::kUnsupportedLayout, Concat(name, ": ", layer->unsupported));
  }
  if (!layer->ready) return Bypass(layer, BypassReason::kNotReady, name);
  return WriteLayer(*open, *layer, call, defer);
}

Outcome Interceptor::Impl::WriteLayer(OpenRound& round, BoundLayer& layer, const WriteCall& call,
                                      bool defer) {
  const CacheGroup& group = table.groups()[layer.group];
  StagingBuffer& staging_buffer = *group.staging;
  const at::Device device = staging_buffer.device();
  const CacheGeometry& geometry = layer.layout.geometry;

  const RowsToWrite chosen = ChooseRows(round.rows.stage_rows(), call.rows);
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
    params.stage_rows = round.rows.device_stage_rows();
  }
  params.cache = layer.layout;
  params.slot_mapping = static_cast<const int64_t*>(slot_mapping.const_data_ptr());
  params.num_rows = static_cast<int32_t>(num_rows);
  params.dtype = RowDType(key, "key");
  params.exclusive = true;
  params.stream = CurrentStream(device);
  if (round.staging) {
    params.staged = staging_buffer.LayerView(layer.staged_layer);
    // A graph may be replayed with more drafts than it was captured with.
    params.num_staging_rows = config.graph_rows > 0
                                  ? static_cast<int32_t>(staging_buffer.capacity_rows())
                                  : round.rows.num_staging_rows();
    params.records = staging_buffer.ReplacesSlots(!call.rows.has_value());
    params.group_slots = static_cast<int64_t*>(staging_buffer.slots().mutable_data_ptr());
    params.status = static_cast<int64_t*>(round.status.mutable_data_ptr());
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
  // A second write of the layer must not overtake the first, nor any the one that records slots.
  DoDeferred(round);
  if (defer) {
    round.deferred.emplace(layer.name,
                           DeferredWrite{params, key, value, slot_mapping, round.epoch});
  } else {
    Stage(params, device);
  }

  Outcome outcome{round.staging ? Action::kStage : Action::kDirect, BypassReason::kNone, 0};
  if (round.capturing) return outcome;
  if (round.staging) {
    outcome.staged_rows = staging_buffer.MarkStaged(layer.staged_layer, chosen.staged);
  }
  layer.round = round.staging ? LayerRound::kStaged : LayerRound::kDirect;
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

void Interceptor::NoteReplay() {
  Impl& impl = *impl_;
  NWOR_CHECK(impl.config.graph_rows > 0,
             "note_replay: graph_rows is 0; set it above 0 in the configuration to replay graphs");
  NWOR_CHECK(impl.open, "note_replay: no round is open; call begin first");
  NWOR_CHECK(!impl.open->capturing,
             "note_replay: the open round is being captured; abort it first");
  const OpenRound& round = *impl.open;
  NWOR_CHECK(impl.FitsGraphs(round.plan), "note_replay: got a round of ", round.plan.num_rows(),
             " rows and ", round.plan.query_lens.size(),
             " requests, expected at most graph_rows = ", impl.config.graph_rows, " of each");
  NWOR_CHECK(!round.staging || impl.graphs.captured != GraphMemory::Captured::kDirectRounds,
             "note_replay: the round is staged, but only direct rounds were captured");
  for (const BoundLayer& layer : impl.table.layers()) {
    NWOR_CHECK(!layer.ready || layer.round == LayerRound::kSilent, "note_replay: layer '",
               layer.name, "' was already written in this round");
  }
  for (const CacheGroup& group : impl.table.groups()) {
    if (round.staging && group.staging != nullptr) group.staging->NoteSlots();
  }
  std::vector<int32_t> staged(round.rows.num_staging_rows());
  std::iota(staged.begin(), staged.end(), 0);
  for (BoundLayer& layer : impl.table.layers()) {
    if (!layer.ready) continue;
    if (round.staging) {
      impl.table.groups()[layer.group].staging->MarkStaged(layer.staged_layer, staged);
    }
    layer.round = round.staging ? LayerRound::kStaged : LayerRound::kDirect;
    const auto num_direct = round.rows.num_rows() - static_cast<int64_t>(staged.size());
    impl.books.CountWrite(num_direct * layer.bytes_per_token(), !staged.empty());
  }
}

}  // namespace nwor
