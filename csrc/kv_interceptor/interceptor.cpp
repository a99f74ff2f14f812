#include "kv_interceptor/interceptor.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "kv_interceptor/commit/error.h"
#include "kv_interceptor/interceptor_impl.h"

namespace nwor {

Interceptor::Interceptor(NworConfig config) {
  constexpr int64_t kMostRows = INT32_MAX / 8;
  NWOR_CHECK(config.staging_rows >= 0 && config.staging_rows <= kMostRows, "staging_rows: got ",
             config.staging_rows, ", expected 0 to ", kMostRows);
  NWOR_CHECK(config.graph_rows >= 0 && config.graph_rows <= kMostRows, "graph_rows: got ",
             config.graph_rows, ", expected 0 to ", kMostRows);
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
  NWOR_CHECK(!impl_->open, "bind_layer: round ", impl_->epoch,
             " is open; commit or abort it before binding layer '", name, "'");
  const BoundLayer& layer =
      impl_->table.Bind(name, key_cache, value_cache, group, k_scale, v_scale, dtype);
  impl_->books.SetLayers(static_cast<int>(impl_->table.layers().size()),
                         impl_->table.num_staging_groups());
  if (layer.ready && layer.key_cache.is_cuda()) impl_->books.UseDevice(layer.key_cache.device());
  if (!layer.unsupported.empty()) {
    impl_->books.Report(BypassReason::kUnsupportedLayout,
                        Concat("layer '", name, "': ", layer.unsupported));
  }
}

Decision Interceptor::Impl::Decide(const RoundPlan& plan, bool capture, std::string* detail) {
  Decision decision;
  const int64_t num_drafts = plan.num_draft_rows();
  if (!enabled) {
    decision.reason = BypassReason::kDisabled;
  } else if (num_drafts > 0 && !table.any_ready()) {
    decision.reason = BypassReason::kNotReady;
  } else if (num_drafts > 0) {
    // Staging that captured graphs know must not move: it does not grow.
    const int64_t rows = config.graph_rows > 0 ? config.staging_rows : num_drafts;
    decision.reason = num_drafts > rows ? BypassReason::kCapacity : Reserve(rows, capture);
    decision.stage = decision.reason == BypassReason::kNone;
    if (decision.reason == BypassReason::kCapacity) {
      *detail = Concat("got ", num_drafts, " draft rows, expected what fits into ",
                       config.max_staging_bytes, " bytes");
      if (config.graph_rows > 0) *detail += Concat(" and staging_rows = ", config.staging_rows);
    } else if (!decision.stage) {
      *detail = Concat("got none for ", rows, " draft rows");
      if (graphs.lack_memory) *detail += " when graphs were captured, so drafts are never staged";
    }
  }
  return decision;
}

BypassReason Interceptor::Impl::Reserve(int64_t rows, bool capture) {
  if (graphs.lack_memory) return BypassReason::kOutOfMemory;
  if (table.HasRoom(rows)) return BypassReason::kNone;
  if (!capture && rounds_to_wait > 0 && rows >= rows_too_many) {
    --rounds_to_wait;
    return BypassReason::kOutOfMemory;
  }
  const BypassReason reason = table.Reserve(rows, config.staging_rows, config.max_staging_bytes);
  books.SetStagingBytes(table.staging_bytes());
  if (reason == BypassReason::kOutOfMemory) {
    rows_too_many = rows;
    rounds_to_wait = kRoundsBetweenTries;
    graphs.lack_memory = capture;
  }
  return reason;
}

OpenRound Interceptor::Impl::MakeRound(const RoundPlan& plan, bool stage, bool capture) {
  const at::Device device = table.device();
  const auto on_device = at::TensorOptions().device(device);
  EndedRound before = std::exchange(last, {});
  if (config.graph_rows > 0 && (!graphs.tables.defined() || graphs.tables.device() != device)) {
    graphs.tables =
        at::empty({RoundTables::FixedWords(config.graph_rows)}, on_device.dtype(at::kInt));
    graphs.status = at::zeros({kNumStatusWords}, on_device.dtype(at::kLong));
    before.clean = false;
  }
  OpenRound round;
  round.staging = stage;
  round.capturing = capture;
  if (before.clean && before.staging == stage && before.rows.in_place() && before.plan == plan) {
    round.plan = std::move(before.plan);
    round.rows = std::move(before.rows);
  } else {
    round.plan = plan;
    round.rows = RoundTables(plan, stage, device, graphs.tables, config.graph_rows);
  }
  if (!stage) return round;
  for (const CacheGroup& group : table.groups()) {
    if (group.staging != nullptr) group.staging->BeginRound(plan.num_draft_rows());
  }
  if (config.graph_rows > 0) {
    if (!before.clean) graphs.status.zero_();
    round.status = graphs.status;
  } else {
    round.status = at::zeros({kNumStatusWords}, on_device.dtype(at::kLong));
  }
  return round;
}

Decision Interceptor::Begin(const RoundPlan& plan, bool capture) {
  Impl& impl = *impl_;
  const int64_t graph_rows = impl.config.graph_rows;
  NWOR_CHECK(!capture || graph_rows > 0,
             "capture: graph_rows is 0; set it above 0 in the configuration to capture rounds");
  NWOR_CHECK(!impl.open, "begin: round ", impl.epoch, " is open; commit or abort it first");
  CheckPlan(plan);
  // A round that is larger has memory of its own, which the next one frees.
  NWOR_CHECK(!capture || impl.FitsGraphs(plan), "capture: got ", plan.num_rows(), " rows of ",
             plan.query_lens.size(), " requests, expected at most graph_rows = ", graph_rows,
             " of each");
  impl.table.CheckConsistent();
  std::string detail;
  Decision decision = impl.Decide(plan, capture, &detail);
  if (decision.reason != BypassReason::kNone && !capture) {
    impl.books.Report(decision.reason, detail);
  }
  impl.open = impl.MakeRound(plan, decision.stage, capture);
  for (BoundLayer& layer : impl.table.layers()) layer.round = LayerRound::kSilent;
  if (capture) {
    using Captured = GraphMemory::Captured;
    impl.graphs.captured = decision.stage ? Captured::kStagedRounds
                                          : std::max(impl.graphs.captured, Captured::kDirectRounds);
  }
  decision.epoch = impl.open->epoch = ++impl.epoch;
  impl.books.SetRound(impl.epoch, /*open=*/true);
  if (impl.observer != nullptr && !capture) impl.observer->AfterBegin(plan, decision);
  return decision;
}

void Interceptor::SetEnabled(bool enabled, BypassReason reason) {
  NWOR_CHECK(!impl_->open, "set_enabled: round ", impl_->epoch,
             " is open; commit or abort it first");
  const bool switched_off = impl_->enabled && !enabled;
  impl_->enabled = enabled;
  if (switched_off) impl_->books.Report(reason, "it was switched off at run time");
}

void Interceptor::ReportBypass(BypassReason reason, std::string_view detail) {
  NWOR_CHECK(reason != BypassReason::kNone,
             "reason: got none, expected the reason of the host's bypass");
  impl_->books.Report(reason, detail);
}

Interceptor::Stats Interceptor::stats() const { return impl_->books.Read(); }

Mode Interceptor::mode() const { return impl_->enabled ? Mode::kStage : Mode::kDisabled; }
const NworConfig& Interceptor::config() const { return impl_->config; }
void Interceptor::SetLogSink(LogSink sink) { impl_->books.SetLogSink(std::move(sink)); }
void Interceptor::SetCacheWriter(CacheWriter* writer) {
  impl_->writer = writer == nullptr ? &PlainCacheWriter() : writer;
}
void Interceptor::SetObserver(InterceptorObserver* observer) { impl_->observer = observer; }
InterceptorObserver* Interceptor::observer() const { return impl_->observer; }
const std::vector<Interceptor::LayerInfo>& Interceptor::layers() const {
  return impl_->table.layers();
}

Interceptor::RoundInfo Interceptor::round() const {
  const Impl& impl = *impl_;
  if (impl.open) {
    return {true, impl.open->staging, impl.epoch, impl.open->plan, impl.open->rows.stage_rows()};
  }
  return {false, impl.last.staging, impl.epoch, impl.last.plan, impl.last.rows.stage_rows()};
}

const StagingBuffer* Interceptor::staging(int group) const {
  const std::vector<CacheGroup>& groups = impl_->table.groups();
  NWOR_CHECK(group >= 0 && group < static_cast<int>(groups.size()), "group: got ", group,
             ", expected 0 to ", static_cast<int>(groups.size()) - 1);
  return groups[group].staging.get();
}

}  // namespace nwor
