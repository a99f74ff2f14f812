#include "bindings/module.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "base/build_info.h"
#include "base/check.h"
#include "kv_interceptor/contract/contract_checker.h"
#include "kv_interceptor/interceptor.h"
#include "metrics/counters.h"
#include "metrics/exporter.h"

// The Python face of the library's objects: configuration, interceptor, checker, metrics. No tensor
// math here; ops are reached through torch.ops. Larger subsystems have a part of their own,
// module_<folder>.cpp.

namespace py = pybind11;

namespace nwor {
namespace {

constexpr const char* Name(Action action) {
  switch (action) {
    case Action::kStage:
      return "stage";
    case Action::kDirect:
      return "direct";
    case Action::kBypass:
      return "bypass";
  }
  return "unknown";
}

RowSpace ParseRowSpace(const std::string& rows) {
  NWOR_CHECK(rows == "batch" || rows == "request", "rows: got '", rows,
             "', expected 'batch' or 'request'");
  return rows == "batch" ? RowSpace::kBatch : RowSpace::kRequest;
}

// None, one tensor for the only group, or one per group.
std::vector<at::Tensor> ParseSlots(const py::object& slots) {
  if (slots.is_none()) return {};
  if (THPVariable_Check(slots.ptr())) return {slots.cast<at::Tensor>()};
  try {
    return slots.cast<std::vector<at::Tensor>>();
  } catch (const py::cast_error&) {
    throw Error(Concat("slots: got ", std::string(py::repr(slots)),
                       ", expected a tensor, one tensor per cache group, or None"));
  }
}

BypassReason ParseReason(const std::string& label) {
  for (int i = 0; i < kNumBypassReasons; ++i) {
    if (kBypassReasonTexts[i].label == label) return static_cast<BypassReason>(i);
  }
  throw Error(Concat("reason: got '", label, "', expected a label of BYPASS_REASONS"));
}

TailTensors ParseTail(const py::object& tail) {
  if (tail.is_none()) return {};
  try {
    return {tail.attr("tail_keys").cast<at::Tensor>(), tail.attr("tail_values").cast<at::Tensor>(),
            tail.attr("tail_begin").cast<at::Tensor>(), tail.attr("root_slots").cast<at::Tensor>(),
            tail.attr("tail_held").cast<at::Tensor>()};
  } catch (const std::exception& error) {
    throw Error(Concat("tail: got ", std::string(py::repr(py::type::of(tail))),
                       ", expected a CommitTail: ", error.what()));
  }
}

// By label, what has happened; those before `first` mean that nothing did.
template <typename Texts, typename Counts>
py::dict NonZero(const Texts& texts, const Counts& counts, size_t first = 0) {
  py::dict found;
  for (size_t i = first; i < counts.size(); ++i) {
    if (counts[i] > 0) found[py::str(texts[i].label)] = counts[i];
  }
  return found;
}

py::dict StatsDict(const Interceptor::Stats& stats) {
  py::dict dict;
  dict["rounds"] = stats.rounds;
  dict["aborted_rounds"] = stats.aborted_rounds;
  dict["stage_operations"] = stats.stage_operations;
  dict["staged_tokens"] = stats.staged_tokens;
  dict["committed_tokens"] = stats.committed_tokens;
  dict["rejected_tokens"] = stats.rejected_tokens;
  dict["failed_tokens"] = stats.failed_tokens;
  dict["cache_bytes_written"] = stats.cache_bytes_written;
  dict["cache_bytes_avoided"] = stats.cache_bytes_avoided;
  dict["staging_bytes"] = stats.staging_bytes;
  dict["fallbacks"] = NonZero(kBypassReasonTexts, stats.fallbacks);
  dict["commit_failures"] = NonZero(kCommitErrorTexts, stats.commit_failures, 1);
  dict["layers"] = stats.num_layers;
  dict["groups"] = stats.num_groups;
  dict["epoch"] = stats.epoch;
  dict["round_open"] = stats.round_open;
  return dict;
}

py::dict MetricsSnapshot() {
  const CountersSnapshot snapshot = [] {
    const py::gil_scoped_release release;  // may wait for a device
    return Counters::Global().Read();
  }();
  py::dict dict;
  for (int i = 0; i < kNumCounters; ++i) {
    const CounterText& text = kCounterTexts[static_cast<size_t>(i)];
    const int64_t value = snapshot.values[i];
    if (text.Unit() == 1.0) {
      dict[text.metric] = value;
    } else {
      dict[text.metric] = text.Unit() * static_cast<double>(value);
    }
  }
  dict["nwor_staging_bytes"] = snapshot.staging_bytes;
  dict["nwor_sessions_live"] = snapshot.live_sessions;
  dict["nwor_staging_off_engines"] = snapshot.staging_off_engines;
  dict["specpv_lossy_engines"] = snapshot.lossy_engines;
  dict["nwor_fallback_total"] = NonZero(kBypassReasonTexts, snapshot.fallbacks);
  dict["nwor_commit_failures_total"] = NonZero(kCommitErrorTexts, snapshot.commit_failures, 1);
  dict["nwor_worker_calls_total"] = NonZero(kCallOutcomeTexts, snapshot.worker_calls);
  int64_t count = 0;
  for (const int64_t bucket : snapshot.latency_buckets) count += bucket;
  dict["nwor_commit_seconds_count"] = count;
  dict["nwor_commit_seconds_sum"] = snapshot.latency_sum_seconds;
  dict["specpv_full_steps_total"] = NonZero(kFullTriggerTexts, snapshot.full_steps, 1);
  dict["specpv_draft_failures_total"] = NonZero(kDraftFailureTexts, snapshot.draft_failures);
  for (int i = 0; i < kNumSummaries; ++i) {
    const std::string name = kSummaryTexts[i].metric;
    dict[py::str(name + "_sum")] = snapshot.summary_sums[i];
    dict[py::str(name + "_count")] = snapshot.summary_counts[i];
  }
  int64_t refreshes = 0;
  for (const int64_t bucket : snapshot.refresh_buckets) refreshes += bucket;
  dict["specpv_refresh_seconds_count"] = refreshes;
  dict["specpv_refresh_seconds_sum"] = snapshot.refresh_sum_seconds;
  return dict;
}

py::dict MetricsStatus() {
  const ExporterStatus status = [] {
    const py::gil_scoped_release release;  // may wait for an endpoint that starts or stops
    return GetExporterStatus();
  }();
  py::dict dict;
  dict["built"] = status.built;
  dict["serving"] = status.serving;
  dict["host"] = status.host;
  dict["port"] = status.port;
  dict["problem"] = status.problem;
  return dict;
}

// Errors become nwor_specpv.NworError, which is defined in Python so that it exists without us.
void BindErrors() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      py::set_error(py::module_::import("nwor_specpv.errors").attr("NworError"), error.what());
    }
  });
}

void BindRounds(py::module_& m) {
  py::class_<NworConfig>(m, "NworConfig", "How an Interceptor stages draft rows; it takes a copy.")
      .def(py::init([](bool enable_nwor, bool strict, int64_t staging_rows,
                       int64_t max_staging_bytes, int64_t graph_rows, std::string agreement_group) {
             return NworConfig{enable_nwor,       strict,     staging_rows,
                               max_staging_bytes, graph_rows, std::move(agreement_group)};
           }),
           py::kw_only(), py::arg("enable_nwor") = true, py::arg("strict") = false,
           py::arg("staging_rows") = NworConfig{}.staging_rows,
           py::arg("max_staging_bytes") = NworConfig{}.max_staging_bytes, py::arg("graph_rows") = 0,
           py::arg("agreement_group") = "", "Sets the members given by name.")
      .def_readwrite("enable_nwor", &NworConfig::enable_nwor,
                     "Whether draft rows are staged at all.")
      .def_readwrite(
          "strict", &NworConfig::strict,
          "Errors instead of fallbacks: every bypass other than 'disabled' raises NworError.")
      .def_readwrite(
          "staging_rows", &NworConfig::staging_rows,
          "Rows to reserve when the first round opens; staging grows between rounds beyond\n"
          "it, unless graph_rows is set.")
      .def_readwrite(
          "max_staging_bytes", &NworConfig::max_staging_bytes,
          "What staging takes at most, over all groups; a round that needs more is written\n"
          "directly.")
      .def_readwrite("graph_rows", &NworConfig::graph_rows,
                     "Above 0: writes may be captured in CUDA graphs of up to so many rows.")
      .def_readwrite(
          "agreement_group", &NworConfig::agreement_group,
          "Registered name of the torch.distributed group whose ranks are asked before a\n"
          "commit writes anything; empty: none. Every rank must then call commit equally\n"
          "often.");

  py::class_<RoundPlan>(
      m, "RoundPlan", "What the engine knows of a round before the forward pass, all on the host.")
      .def(py::init([](std::vector<int32_t> query_lens, std::vector<int32_t> num_drafts,
                       std::vector<std::vector<int32_t>> parents, bool ascending) {
             return RoundPlan{std::move(query_lens), std::move(num_drafts), std::move(parents),
                              ascending};
           }),
           py::arg("query_lens"), py::arg("num_drafts"),
           py::arg("parents") = std::vector<std::vector<int32_t>>{}, py::arg("ascending") = false,
           "Request b has query_lens[b] rows in the batch, in order, the last num_drafts[b] of\n"
           "which are drafts; at least one is none. Interceptor.begin judges it.")
      .def_readonly("query_lens", &RoundPlan::query_lens, "Rows of each request, [B].")
      .def_readonly("num_drafts", &RoundPlan::num_drafts,
                    "Draft rows of each request, its last ones, [B].")
      .def_readonly("parents", &RoundPlan::parents,
                    "Of draft trees: for each request, the parent of each draft as a row of the\n"
                    "request, 0 its first. Empty: chains.")
      .def_readonly("ascending", &RoundPlan::ascending,
                    "Draft trees whose parents only the device knows: a commit checks that the\n"
                    "rows of a path ascend, not how they are linked.");

  py::class_<Decision>(m, "Decision", "What Interceptor.begin decided for the whole round.")
      .def_readonly("stage", &Decision::stage, "Whether the round's drafts are staged.")
      .def_property_readonly(
          "reason", [](const Decision& d) { return Label(d.reason); },
          "Why they are not, a label of BYPASS_REASONS; 'none' when nothing was bypassed.")
      .def_readonly(
          "epoch", &Decision::epoch,
          "The round's number; pass it to Interceptor.write, which refuses that of another\n"
          "round.")
      .def("__repr__", [](const Decision& d) {
        return Concat("Decision(stage=", d.stage ? "True" : "False", ", reason='", Label(d.reason),
                      "', epoch=", d.epoch, ")");
      });

  py::class_<Outcome>(m, "Outcome", "What Interceptor.write did with a layer's rows.")
      .def_property_readonly(
          "action", [](const Outcome& o) { return Name(o.action); },
          "'stage': drafts are in staging, all other rows in the cache. 'direct': every row\n"
          "is in the cache. 'bypass': nothing was written and the engine does its own write,\n"
          "except for the reason 'stale_round', whose rows belong to nobody any more.")
      .def_property_readonly(
          "reason", [](const Outcome& o) { return Label(o.reason); },
          "Why rows were not staged, a label of BYPASS_REASONS.")
      .def_readonly("staged_rows", &Outcome::staged_rows,
                    "Rows this call staged for the first time in this layer.")
      .def("__repr__", [](const Outcome& o) {
        return Concat("Outcome(action='", Name(o.action), "', reason='", Label(o.reason),
                      "', staged_rows=", o.staged_rows, ")");
      });

  py::class_<CommitVerdict>(m, "CommitVerdict", "What a commit found wrong, and where.")
      .def_property_readonly(
          "error", [](const CommitVerdict& v) { return Label(v.error); },
          "A label of COMMIT_ERRORS; 'ok': nothing.")
      .def_readonly("request", &CommitVerdict::request, "The request it was found in.")
      .def_readonly("index", &CommitVerdict::index, "Its index on the request's path.")
      .def_readonly("value", &CommitVerdict::value, "The offending value.");

  // Others may run while it waits for the device.
  const auto waiting = [](auto read) {
    return py::cpp_function(read, py::call_guard<py::gil_scoped_release>());
  };
  py::class_<Receipt>(
      m, "Receipt",
      "A commit's answer. On CUDA it is pending until the device gets there: ok, verdict\n"
      "and committed_tokens wait for it.")
      .def_property_readonly(
          "ok", waiting(&Receipt::ok),
          "Whether the commit was valid and nothing is lost; waits for the device.")
      .def_property_readonly("verdict", waiting(&Receipt::verdict),
                             "What was wrong, if anything; waits for the device.")
      .def_property_readonly(
          "committed_tokens", waiting(&Receipt::committed_tokens),
          "Draft tokens written to every layer, 0 unless the verdict is 'ok'; waits for the\n"
          "device.")
      .def_property_readonly(
          "degraded", [](const Receipt& r) { return Label(r.degraded); },
          "Why the commit was not done in one piece, a label of BYPASS_REASONS, as far as the\n"
          "host knows without waiting; 'none': it was. After 'commit_lost' the host must\n"
          "compute the requests again or end them.")
      .def_readonly("problem", &Receipt::problem, "Text for people when degraded, else empty.")
      .def_readonly(
          "status", &Receipt::status,
          "The same on the caches' device, [8] int64: error as an index into COMMIT_ERRORS,\n"
          "request, index, value, committed tokens.")
      .def_readonly("epoch", &Receipt::epoch, "Number of the round it belongs to.");
}

void BindInterceptor(py::module_& m) {
  py::class_<Interceptor>(
      m, "Interceptor",
      "Where an engine's K/V writes pass through: draft rows wait in staging, and only\n"
      "accepted ones reach the paged caches.\n"
      "\n"
      "A round is one verification step: begin, write for each layer, commit or abort.\n"
      "One round at a time, from one thread at a time; stats() and mode may be read from\n"
      "any. Device work is enqueued on the current stream, and begin, write and commit\n"
      "never wait for the device.")
      .def(py::init([](const NworConfig& config) {
             auto interceptor = std::make_unique<Interceptor>(config);
             interceptor->SetLogSink([](BypassReason reason, std::string_view message) {
               const py::gil_scoped_acquire acquire;
               py::module_::import("nwor_specpv.errors").attr("log_bypass")(Label(reason), message);
             });
             return interceptor;
           }),
           py::arg_v("config", NworConfig{}, "NworConfig()"),
           "The configuration is copied. The first bypass of each reason is logged.")
      .def("bind_layer", &Interceptor::BindLayer, py::arg("name"), py::arg("key_cache"),
           py::arg("value_cache"), py::arg("group") = 0, py::arg("k_scale") = py::none(),
           py::arg("v_scale") = py::none(), py::arg("dtype") = py::none(),
           "Registers a layer's paged cache, [P, S, H, D] views with contiguous channels.\n"
           "Layers of one group share slots and geometry; dtype is the model's, needed when\n"
           "the cache is float8. A name bound again gets the new cache. Raises NworError when\n"
           "a round is open.")
      .def("begin", &Interceptor::Begin, py::arg("plan"), py::arg("capture") = false,
           "Opens a round and decides, before any write, whether its drafts are staged; one\n"
           "that does not fit is written directly and says why. Raises NworError when a round\n"
           "is open or the plan is wrong. With capture the round's writes are only captured in\n"
           "a CUDA graph: nothing is counted, and abort ends it; needs graph_rows.")
      .def("note_replay", &Interceptor::NoteReplay,
           "Tells that a captured graph has done the writes of every layer in this round.\n"
           "Needs an open round, graph_rows, and no layer written.")
      .def("write", &Interceptor::Write, py::arg("layer"), py::arg("key"), py::arg("value"),
           py::arg("slot_mapping"), py::arg("rows") = py::none(), py::arg("epoch") = py::none(),
           py::arg("defer") = false,
           "Routes one layer's rows: key and value [n, H, D], slot_mapping [n] int64, -1:\n"
           "skip. rows are those of the batch these are (default: all, in order). Nothing is\n"
           "written when an argument is wrong, which raises NworError. With defer the write\n"
           "may wait for merge_and_write_rows or the commit: until then nothing may read the\n"
           "rows from the cache or change the tensors.")
      .def(
          "commit",
          [](Interceptor& self, const at::Tensor& path, const at::Tensor& counts,
             const py::object& slots, const std::string& rows, bool last, const py::object& tail) {
            const std::vector<at::Tensor> group_slots = ParseSlots(slots);
            const TailTensors tail_tensors = ParseTail(tail);
            const RowSpace space = ParseRowSpace(rows);
            const py::gil_scoped_release release;  // may wait for other ranks
            return self.Commit(path, counts, group_slots, space, last, tail_tensors);
          },
          py::arg("path"), py::arg("counts"), py::arg("slots") = py::none(),
          py::arg("rows") = "batch", py::arg("last") = true, py::arg("tail") = py::none(),
          "Moves the accepted rows to the caches of every layer, or none of them: path [B,\n"
          "depth] int32, -1 padded; counts [B] int32. path names rows of the batch, or with\n"
          "rows='request' of the request. slots are destinations [B, depth] int64, a tensor\n"
          "or one for each cache group (default: those the rows were written with). With\n"
          "last=False the round stays open for the next chunk. tail is a CommitTail that the\n"
          "same launch feeds.\n"
          "\n"
          "On the CPU a wrong path, count or slot raises NworError before anything is\n"
          "written; on CUDA the receipt says it, and nothing is written.")
      .def("abort", &Interceptor::Abort,
           "Ends the round without writing; its drafts count as rejected. Raises NworError\n"
           "when no round is open.")
      .def(
          "set_enabled", [](Interceptor& self, bool enabled) { self.SetEnabled(enabled); },
          py::arg("enabled"), "Switches staging on or off; raises NworError when a round is open.")
      .def(
          "report_bypass",
          [](Interceptor& self, const std::string& reason, const std::string& detail) {
            self.ReportBypass(ParseReason(reason), detail);
          },
          py::arg("reason"), py::arg("detail") = "",
          "Counts, and logs the first time, a bypass that the host took by itself; reason is\n"
          "a label of BYPASS_REASONS. Raises NworError when strict, unless it is 'disabled'.")
      .def(
          "stats",
          [](const Interceptor& self) {
            Interceptor::Stats stats;
            {
              const py::gil_scoped_release release;  // may wait for the device
              stats = self.stats();
            }
            return StatsDict(stats);
          },
          "What this interceptor has done: tokens, bytes, rounds, and fallbacks by reason.\n"
          "Waits for what this thread has enqueued on the device.")
      .def_property_readonly(
          "mode",
          [](const Interceptor& self) {
            return self.mode() == Mode::kStage ? "stage" : "disabled";
          },
          "'stage' or 'disabled'.")
      .def(
          "staged",
          [](const Interceptor& self, int group) {
            const StagingBuffer* staging = self.staging(group);
            NWOR_CHECK(staging != nullptr && staging->keys().defined(), "group: got ", group,
                       ", expected a group that has staged something");
            return std::pair(staging->keys(), staging->values());
          },
          py::arg("group") = 0, "K and V in staging, [layers, rows, heads, channels].")
      .def(
          "stage_rows", [](const Interceptor& self) { return self.round().stage_rows; },
          "The staging row of each row of the batch, -1 for those written directly.");
}

void BindChecker(py::module_& m) {
  py::class_<Violation>(m, "Violation", "A rule of the commit contract that was broken.")
      .def_readonly("rule", &Violation::rule, "Its name, such as 'C2' or 'N8'.")
      .def_readonly("layer", &Violation::layer, "The layer's name; empty: not about one layer.")
      .def_readonly("slot", &Violation::slot, "The slot; -1: not about one slot.")
      .def_readonly("detail", &Violation::detail, "What was found, text for people.")
      .def("__repr__", [](const Violation& v) {
        return Concat("Violation(rule='", v.rule, "', layer='", v.layer, "', slot=", v.slot,
                      ", detail='", v.detail, "')");
      });

  py::class_<ContractChecker>(
      m, "ContractChecker",
      "Remembers the caches' bytes before a round, follows the engine's calls, and says\n"
      "afterwards which rule of the commit contract was broken. Slow: it reads every\n"
      "bound cache and waits for the device.")
      .def(py::init<Interceptor&>(), py::arg("interceptor"), py::keep_alive<1, 2>(),
           "Watches the interceptor as long as the checker is there, in place of an earlier\n"
           "one.")
      .def("snapshot", &ContractChecker::Snapshot,
           "Hashes every bound cache and starts new books; without one nothing is watched. No\n"
           "round may be open.")
      .def("tell_request", &ContractChecker::TellRequest, py::arg("request"), py::arg("num_tokens"),
           py::arg("num_pages"), py::arg("page_size"),
           "Tokens and pages held by a request of the round, for rule C1; told again after the\n"
           "round, the change is checked too.")
      .def("tell_free_slots", &ContractChecker::TellFreeSlots, py::arg("free_slots"),
           "The host's free slots, for rule C4; told again after the round, the change is\n"
           "checked too.")
      .def("verify_staged", &ContractChecker::VerifyStaged,
           "Violations after the last write and before the commit: drafts must be in staging\n"
           "and nowhere else. Needs a snapshot.")
      .def("verify", &ContractChecker::Verify, py::arg("receipt") = nullptr,
           py::arg("emitted") = std::vector<int64_t>{},
           "Violations after the commit, or after an abort without a receipt. emitted: draft\n"
           "tokens the host emitted for each request; empty: not checked. Needs a snapshot.");
}

void BindMetrics(py::module_& m) {
  m.def("metrics_snapshot", &MetricsSnapshot,
        "The process-wide counters by metric name; those with a label are dicts of the\n"
        "labels that are not 0. May wait for a device.");
  m.def("metrics_status", &MetricsStatus,
        "Where the Prometheus endpoint stands: built, serving, host, port, problem.");
  m.def("metrics_serve", &ServeMetrics, py::arg("host"), py::arg("port"),
        py::call_guard<py::gil_scoped_release>(),
        "Starts or moves the Prometheus endpoint and returns its port (port 0: any free\n"
        "one), or -1 when the port is busy. Raises NworError for a bad host or port, or a\n"
        "build without prometheus-cpp.");
  m.def("metrics_stop", &StopMetrics, py::call_guard<py::gil_scoped_release>(),
        "Stops the Prometheus endpoint.");
  m.def("metrics_render", &RenderMetrics, py::call_guard<py::gil_scoped_release>(),
        "The exposition text that a scrape would get.");
  py::dict reasons;
  for (const ReasonText& text : kBypassReasonTexts) {
    reasons[py::str(text.label)] = text.sentence;
  }
  m.attr("BYPASS_REASONS") = reasons;
  py::list errors;
  for (const ReasonText& text : kCommitErrorTexts) errors.append(text.label);
  m.attr("COMMIT_ERRORS") = errors;
}

}  // namespace
}  // namespace nwor

PYBIND11_MODULE(_C, m) {
  nwor::BindErrors();
  nwor::BindRounds(m);
  nwor::BindInterceptor(m);
  nwor::BindChecker(m);
  nwor::BindMetrics(m);
  nwor::BindAttention(m);
  nwor::BindTree(m);
  nwor::BindSpecPV(m);
  nwor::BindSlots(m);
  nwor::BindSession(m);
  nwor::BindDrafters(m);
}
