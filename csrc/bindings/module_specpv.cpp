#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "base/check.h"
#include "bindings/module.h"
#include "bindings/module_collected.h"
#include "metrics/counters.h"
#include "specpv/config.h"
#include "specpv/partial_cache.h"
#include "specpv/partial_store.h"
#include "specpv/verify_policy.h"
#include "specpv/view_gather.h"

// The Python face of partial verification: its configuration, the state of requests, the policy.

namespace py = pybind11;

namespace nwor {
namespace {

Error WrongType(const char* name, const py::object& value, const char* expected) {
  std::string text;
  try {
    text = py::repr(value);
  } catch (const py::error_already_set&) {  // an integer of thousands of digits
    text = "one that cannot be printed";
  }
  return Error(Concat(name, ": got ", text, ", expected ", expected));
}

// In Python a flag is a number and a number is true or false: neither is meant.
bool ToFlag(const char* name, const py::object& value) {
  if (!py::isinstance<py::bool_>(value)) throw WrongType(name, value, "true or false");
  return value.cast<bool>();
}
int64_t ToNumber(const char* name, const py::object& value) {
  if (!py::isinstance<py::bool_>(value)) {
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!index) PyErr_Clear();
    int overflow = 0;
    const int64_t number = index ? PyLong_AsLongLongAndOverflow(index.ptr(), &overflow) : 0;
    if (index && overflow == 0) return number;
  }
  throw WrongType(name, value, "an integer of 64 bits");
}
std::string ToText(const char* name, const py::object& value) {
  if (!py::isinstance<py::str>(value)) throw WrongType(name, value, "a string");
  return value.cast<std::string>();
}

// A member that is a flag or a number, and one that is an enumerator and a string in Python.
#define NWOR_FLAG(name, doc)                               \
  def_property(                                            \
      #name, [](const SpecPVConfig& c) { return c.name; }, \
      [](SpecPVConfig& c, const py::object& value) { c.name = ToFlag(#name, value); }, doc)
#define NWOR_NUMBER(name, doc)                             \
  def_property(                                            \
      #name, [](const SpecPVConfig& c) { return c.name; }, \
      [](SpecPVConfig& c, const py::object& value) { c.name = ToNumber(#name, value); }, doc)
#define NWOR_CHOICE(name, Enum, doc)                                                   \
  def_property(                                                                        \
      #name, [](const SpecPVConfig& c) { return ChoiceName(c.name, k##Enum##Names); }, \
      [](SpecPVConfig& c, const py::object& value) {                                   \
        c.name = ParseChoice<Enum>(#name, ToText(#name, value), k##Enum##Names);       \
      },                                                                               \
      doc)

// Sets every member given by name, then checks them together.
SpecPVConfig MakeConfig(const py::kwargs& values) {
  const py::object config = py::cast(SpecPVConfig{});
  for (const auto& [name, value] : values) {
    const auto unknown = [name = std::string(py::str(name))] {
      return Error(Concat("SpecPVConfig: got an unknown name '", name,
                          "', expected enable_specpv or specpv_*, see Settings"));
    };
    if (!py::hasattr(config, name)) throw unknown();
    try {
      py::setattr(config, name, value);
    } catch (py::error_already_set& error) {
      if (error.matches(PyExc_AttributeError)) throw unknown();  // a method's name
      throw;
    }
  }
  auto checked = config.cast<SpecPVConfig>();
  checked.Validate();
  return checked;
}

void BindConfig(py::module_& m) {
  py::class_<Budget>(m, "Budget", "What a request may see under partial verification.")
      .def_readonly("block_size", &Budget::block_size, "Tokens of a block.")
      .def_readonly("sink_blocks", &Budget::sink_blocks,
                    "Blocks at the start that are always seen.")
      .def_readonly("retrieval_blocks", &Budget::retrieval_blocks,
                    "Blocks chosen by score, at most.")
      .def_readonly("window_blocks", &Budget::window_blocks,
                    "Blocks before the tail that are always seen.")
      .def_readonly("tail_capacity", &Budget::tail_capacity, "Tokens the tail has room for.")
      .def_readonly("max_rows", &Budget::max_rows, "Rows of the largest tree, the root included.")
      .def_property_readonly(
          "static_tokens", &Budget::static_tokens,
          "Tokens of sink, retrieved blocks and window: a context no longer than this is seen\n"
          "whole.")
      .def_property_readonly("max_view_blocks", &Budget::max_view_blocks,
                             "Blocks of the longest view.");

  py::class_<SpecPVConfig>(
      m, "SpecPVConfig",
      "How partial verification works. A member that is set checks the value's type,\n"
      "validate() all of them together.")
      .def(py::init(&MakeConfig),
           "Sets the members given by name, then validates; raises NworError.")
      .NWOR_FLAG(enable_specpv, "Whether long contexts are verified over a partial view.")
      .NWOR_NUMBER(specpv_block_size, "Tokens of a block; divides the page size.")
      .NWOR_NUMBER(specpv_n_sink_blocks, "Blocks at the start that are always seen.")
      .NWOR_NUMBER(specpv_n_retrieval_blocks, "Blocks chosen by score.")
      .NWOR_NUMBER(specpv_n_window_blocks, "Blocks before the tail that are always seen.")
      .NWOR_NUMBER(specpv_n_spec_tokens_buf, "Tokens of the tail beyond the rows of one tree.")
      .NWOR_NUMBER(specpv_partial_threshold, "Tokens of context up to which no step is partial.")
      .NWOR_NUMBER(specpv_full_refresh_interval,
                   "Partial steps between full ones at most; 0: as many as the tail holds.")
      .NWOR_CHOICE(
          specpv_selector, Selector,
          "What a view has besides the tail: 'specpv' sink, retrieval, window; 'streaming'\n"
          "sink, window; 'sliding' window; 'quest' retrieval, window.")
      .NWOR_CHOICE(specpv_score, Score,
                   "How a block is scored: 'specpv', 'quest', or 'auto', by the selector.")
      .NWOR_CHOICE(specpv_query_reduce, QueryReduce,
                   "How scores are reduced over the rows of a tree: 'mean', 'max' or 'last'.")
      .NWOR_CHOICE(specpv_group_reduce, GroupReduce,
                   "How scores are reduced over the query heads of a KV head: 'mean' or 'max'.")
      .NWOR_CHOICE(specpv_selection, Selection,
                   "Blocks 'per_head', for each KV head, or one list 'shared' by all.")
      .NWOR_CHOICE(specpv_storage, Storage,
                   "'paged': block lists into the cache; 'compact': contiguous copies.")
      .NWOR_CHOICE(
          specpv_mode, SpecPVMode,
          "What a full step does to the tokens of partial ones: 'rectify' recomputes their\n"
          "K/V, 'refresh' leaves it, 'lossless' confirms them before they are emitted.")
      .NWOR_CHOICE(specpv_budget, BudgetRule,
                   "Blocks to retrieve: 'fixed', alike for all requests, or 'adaptive', by length.")
      .NWOR_FLAG(specpv_offload,
                 "Whether the full cache lives in host memory; needs compact storage.")
      .def("validate", &SpecPVConfig::Validate,
           "Raises NworError unless each value is in its range and they fit each other.")
      .def("validate_for", &SpecPVConfig::ValidateFor, py::arg("page_size"), py::arg("max_rows"),
           py::arg("max_context"), py::arg("tail_capacity") = -1,
           "Raises NworError unless it also fits an engine: its page size, the rows of its\n"
           "largest tree (the root included), its longest context. tail_capacity: tokens the\n"
           "engine has set aside for the tail, -1: ours.")
      .def(
          "budget",
          [](const SpecPVConfig& config, int64_t max_rows, int64_t prompt_tokens,
             int64_t max_new_tokens) {
            config.Validate();
            CheckMaxRows(max_rows);
            NWOR_CHECK(prompt_tokens >= 0 && max_new_tokens >= 0,
                       "prompt_tokens, max_new_tokens: ", "got ", prompt_tokens, " and ",
                       max_new_tokens, ", expected 0 or more");
            return ChooseBudget(config, max_rows, prompt_tokens, max_new_tokens);
          },
          py::arg("max_rows"), py::arg("prompt_tokens") = 0, py::arg("max_new_tokens") = 0,
          "The Budget of a request; the lengths matter to an adaptive one alone.");
}

#undef NWOR_FLAG
#undef NWOR_NUMBER
#undef NWOR_CHOICE

FullTrigger ParseTrigger(std::string_view text) {
  std::array<std::string_view, kNumFullTriggers> labels;
  for (int i = 0; i < kNumFullTriggers; ++i) labels[i] = kFullTriggerTexts[i].label;
  return ParseChoice<FullTrigger>("trigger", text, labels);
}

// A policy whose callback Python's collector sees: it is often a method of whoever holds it.
class PythonPolicy : public VerifyPolicy {
 public:
  PythonPolicy(const SpecPVConfig& config, py::object callback)
      : PythonPolicy(config, std::make_shared<py::object>(std::move(callback))) {}

  int VisitHeld(visitproc visit, void* arg) const {
    Py_VISIT(callback_->ptr());
    return 0;
  }
  void LetGo() { *callback_ = py::object(); }

 private:
  using HeldCallback = std::shared_ptr<py::object>;  // by the policy's function too

  PythonPolicy(const SpecPVConfig& config, HeldCallback callback)
      : VerifyPolicy(config, MakeCallback(callback)), callback_(std::move(callback)) {}

  static PolicyCallback MakeCallback(const HeldCallback& held) {
    if (held->is_none()) return nullptr;
    return [held](const PartialCache& cache) {
      // Held here as well: the call may be what clears it.
      const auto callback = py::reinterpret_borrow<py::object>(*held);
      NWOR_CHECK(callback,
                 "callback: got a call after the garbage collector cleared the policy, expected "
                 "none");
      // The cache as Python knows it, whatever class it has there.
      return callback(py::cast(&cache, py::return_value_policy::reference)).cast<bool>();
    };
  }

  const HeldCallback callback_;
};

void BindSteps(py::module_& m) {
  py::dict triggers;
  for (const ReasonText& text : kFullTriggerTexts) {
    triggers[py::str(text.label)] = text.sentence;
  }
  m.attr("FULL_TRIGGERS") = triggers;

  py::class_<StepDecision>(
      m, "StepDecision",
      "What a step of one request is to do. Its rows are refed_rows tokens of the tail,\n"
      "then the tree's.")
      .def_property_readonly(
          "kind", [](const StepDecision& d) { return ChoiceName(d.kind, kStepKindNames); },
          "'full', 'full_refresh' or 'partial'.")
      .def_property_readonly(
          "trigger", [](const StepDecision& d) { return Label(d.trigger); },
          "Why it is full, a label of FULL_TRIGGERS; 'none': it is partial.")
      .def_readonly("num_rows", &StepDecision::num_rows, "Rows of the tree, the root included.")
      .def_readonly("full_len", &StepDecision::full_len,
                    "Tokens that full attention had verified when it was decided.")
      .def_readonly("committed_len", &StepDecision::committed_len,
                    "Tokens that were committed when it was decided.")
      .def_readonly("prefix_len", &StepDecision::prefix_len,
                    "Tokens before its rows that they attend to, unless it is partial.")
      .def_readonly(
          "refed_rows", &StepDecision::refed_rows,
          "Tokens of the tail that are fed again before the tree, at positions full_len to\n"
          "committed_len - 1.")
      .def_readonly("view_tokens", &StepDecision::view_tokens,
                    "Tokens of the context that the tree's rows see.")
      .def_readonly("keeps_view", &StepDecision::keeps_view,
                    "Whether it is full for want of room, and leaves what was selected as it is.")
      .def("__repr__", [](const StepDecision& d) {
        return Concat("StepDecision(kind='", ChoiceName(d.kind, kStepKindNames), "', trigger='",
                      Label(d.trigger), "', prefix_len=", d.prefix_len,
                      ", refed_rows=", d.refed_rows, ", num_rows=", d.num_rows, ")");
      });

  py::class_<StepOutcome>(m, "StepOutcome", "What a step changed.")
      .def_readonly("committed", &StepOutcome::committed,
                    "Tokens committed; negative when a lossless step cut the tail.")
      .def_readonly("emitted", &StepOutcome::emitted,
                    "Tokens the host may show, the correction or bonus token included.")
      .def_readonly("cut", &StepOutcome::cut, "Tokens of the tail that were taken back.");

  py::class_<PartialCache, std::shared_ptr<PartialCache>>(
      m, "PartialCache",
      "The state of one request under partial verification, on the host: full_len tokens\n"
      "were verified by full attention, those behind them up to committed_len are the\n"
      "tail, whose K/V is provisional. Not thread-safe.")
      .def(py::init<const SpecPVConfig&, int64_t, int64_t, int64_t>(), py::arg("config"),
           py::arg("max_rows"), py::arg("prompt_tokens") = 0, py::arg("max_new_tokens") = 0,
           "max_rows: rows of the largest tree, the root included. The lengths matter to an\n"
           "adaptive budget alone. Raises NworError for a wrong configuration.")
      .def("prefill", &PartialCache::Prefill, py::arg("num_tokens"),
           "Adds tokens that full attention has put into the cache outside of steps: the\n"
           "prompt. Raises NworError when there is a tail.")
      .def("restart", &PartialCache::Restart, py::arg("num_tokens"),
           "All of the context, num_tokens tokens, was computed by full attention outside of\n"
           "steps: rows of a prompt, or tokens that are computed again. Blocks are selected\n"
           "anew.")
      .def("reach", &PartialCache::Reach, py::arg("num_tokens"),
           "For hosts of mode 'refresh' that learn later what steps have committed: the context\n"
           "has num_tokens tokens, at most. Called before a step is decided; finish_later ends\n"
           "the step. full_len is then the length at which blocks were selected.")
      .def("finish_later", &PartialCache::FinishLater, py::arg("decision"),
           "Ends the step of a decision and counts it, where the next reach says what it has\n"
           "committed. Raises NworError when the decision is not of this state.")
      .def("finish", &PartialCache::Finish, py::arg("decision"), py::arg("accepted"),
           py::arg("disagreed") = -1,
           "Ends the step of a decision and counts it. accepted: draft rows that acceptance\n"
           "took, the root excluded; in a lossless full_refresh step over the re-fed rows and\n"
           "the tree, the first of them excluded. disagreed: re-fed rows at which full\n"
           "attention chooses another token than was emitted; -1: not looked at. Raises\n"
           "NworError when the decision is not of this state.")
      .def(
          "require_full",
          [](PartialCache& self, std::string_view trigger) {
            self.RequireFull(ParseTrigger(trigger));
          },
          py::arg("trigger") = "policy",
          "Makes the next step full and refreshing; trigger is a label of FULL_TRIGGERS.")
      .def("count_drift", &PartialCache::CountDrift, py::arg("rechecked"), py::arg("disagreed"),
           "Counts drift that a host learns of apart from a step's end: of so many rechecked\n"
           "tokens full attention would have chosen disagreed differently.")
      .def_property_readonly(
          "full_len", &PartialCache::full_len,
          "Tokens verified by full attention; prefix caches may publish these and no others.")
      .def_property_readonly("committed_len", &PartialCache::committed_len, "Tokens committed.")
      .def_property_readonly("emitted_len", &PartialCache::emitted_len,
                             "Tokens the host may show; lossless: the confirmed ones.")
      .def_property_readonly("tail_len", &PartialCache::tail_len,
                             "Tokens of the tail: committed_len - full_len.")
      .def_property_readonly("anchor_len", &PartialCache::anchor_len,
                             "The length its blocks were selected at.")
      .def_property_readonly("partial_steps", &PartialCache::partial_steps,
                             "Partial steps since the last full one.")
      .def_property_readonly("selected", &PartialCache::selected,
                             "Whether blocks are selected, without which no step is partial.")
      .def_property_readonly("view_tokens", &PartialCache::view_tokens,
                             "Tokens that a partial step would see now.")
      .def_property_readonly("rechecked_tokens", &PartialCache::rechecked_tokens,
                             "Emitted tokens that full attention has looked at again.")
      .def_property_readonly("disagreed_tokens", &PartialCache::disagreed_tokens,
                             "Those of them it would have chosen differently.")
      .def_property_readonly("budget", &PartialCache::budget, "The request's Budget.")
      .def("set_bytes_per_token", &PartialCache::set_bytes_per_token, py::arg("bytes"),
           "Sets the bytes of K and V of one token over all layers, for\n"
           "specpv_kv_bytes_read_total; 0: they are not counted.")
      .def_property_readonly(
          "required", [](const PartialCache& self) { return Label(self.required()); },
          "Why the next step has to be full, a label of FULL_TRIGGERS; 'none': it need not\n"
          "be.")
      .def_property_readonly(
          "segments",
          [](const PartialCache& self) {
            const ViewSegments segments = self.segments();
            const int64_t full = self.full_len();
            // A context that ends within the sink has nothing behind it.
            const auto end = [&](int64_t blocks) {
              return std::min(blocks * self.budget().block_size, full);
            };
            const int64_t sink = end(segments.sink_blocks), window = end(segments.window_begin);
            py::dict tokens;
            tokens["sink"] = std::pair(int64_t{0}, sink);
            tokens["candidates"] = std::pair(sink, window);
            tokens["window"] = std::pair(window, full);
            tokens["tail"] = std::pair(full, self.committed_len());
            return tokens;
          },
          "Tokens [begin, end) of sink, candidates, window and tail.");

  py::class_<PythonPolicy>(
      m, "VerifyPolicy", Collected<PythonPolicy>::Setup(),
      "Decides how the next step of a request verifies its tree: full, full with a\n"
      "refresh, or partial.")
      .def(py::init<const SpecPVConfig&, py::object>(), py::arg("config"),
           py::arg("callback") = py::none(),
           "callback(cache), a PartialCache, returns whether to ask for a full step where the\n"
           "rules would allow a partial one.")
      .def("decide", &PythonPolicy::Decide, py::arg("cache"), py::arg("num_rows"),
           py::arg("viewable") = true,
           "The StepDecision for a tree of num_rows rows, 1 to the budget's max_rows; reads\n"
           "host state only. viewable: the host has room for a view of this request in this\n"
           "step; without, which mode 'refresh' alone allows, the step is full.")
      .def("always_full_tokens", &PythonPolicy::AlwaysFullTokens, py::arg("budget"),
           "Tokens of context up to which every step of a request with this Budget is full.");
}

std::vector<BatchEntry> ParseBatch(const py::sequence& batch) {
  std::vector<BatchEntry> entries;
  for (const py::handle item : batch) {
    if (item.is_none()) {
      entries.emplace_back();
      continue;
    }
    try {
      const auto pair = item.cast<std::pair<std::shared_ptr<StoredCache>, StepDecision>>();
      entries.push_back({pair.first, pair.second});
    } catch (const py::cast_error&) {
      throw Error(Concat("batch[", entries.size(), "]: got ", std::string(py::repr(item)),
                         ", expected (a cache of the store, its decision) or None"));
    }
  }
  return entries;
}

void BindStore(py::module_& m) {
  m.def(
      "pinned_cache",
      [](const std::vector<int64_t>& sizes, at::ScalarType dtype, const at::Device& device) {
        return PinnedCache(sizes, dtype, device);
      },
      py::arg("sizes"), py::arg("dtype"), py::arg("device"),
      "A paged cache of these sizes in pinned host memory that the device reads and\n"
      "writes in place; ordinary memory on the CPU. Raises NworError when there is not\n"
      "enough.");

  py::class_<StoredCache, PartialCache, std::shared_ptr<StoredCache>>(
      m, "StoredCache",
      "A request of a PartialStore: its PartialCache and its row, which is free again\n"
      "when it goes.")
      .def_property_readonly("row", &StoredCache::row, "Its row in the store's tensors.")
      .def_property_readonly("summarized_blocks", &StoredCache::summarized_blocks,
                             "Complete blocks whose summaries are there, in every layer.");

  py::class_<PartialStore, std::shared_ptr<PartialStore>>(
      m, "_PartialStore", "What partial verification keeps on the device for a number of requests.")
      .def(
          py::init([](const SpecPVConfig& config, const std::vector<at::Tensor>& key_caches,
                      const std::vector<at::Tensor>& value_caches, int64_t max_requests,
                      int64_t max_tokens, int64_t max_rows, const std::vector<at::Tensor>& k_scales,
                      std::optional<at::ScalarType> dtype) {
            return PartialStore::Create(config, key_caches, value_caches,
                                        {max_requests, max_tokens, max_rows, dtype}, k_scales);
          }),
          py::arg("config"), py::arg("key_caches"), py::arg("value_caches"), py::kw_only(),
          py::arg("max_requests"), py::arg("max_tokens"), py::arg("max_rows"),
          py::arg("k_scales") = std::vector<at::Tensor>{}, py::arg("dtype") = py::none(),
          "Caches are [P, S, Hkv, D] views, a pair for each layer, of one size, dtype and\n"
          "device; all memory is taken here. max_requests is also the size of a step's batch,\n"
          "max_tokens the longest context, max_rows the rows of the largest tree, dtype that\n"
          "of summaries. Raises NworError when the configuration does not fit.")
      .def(
          "open",
          [](PartialStore& self, int64_t prompt_tokens,
             int64_t max_new_tokens) -> std::optional<std::shared_ptr<StoredCache>> {
            std::shared_ptr<StoredCache> cache = self.Open(prompt_tokens, max_new_tokens);
            return cache ? std::optional(std::move(cache)) : std::nullopt;
          },
          py::arg("prompt_tokens") = 0, py::arg("max_new_tokens") = 0,
          "A new request, or None when no row is free: it then runs full.")
      .def(
          "begin",
          [](PartialStore& self, const py::sequence& batch) { self.Begin(ParseBatch(batch)); },
          py::arg("batch"),
          "Tells the device what the requests of this step do: (cache, decision) or None for\n"
          "each. Raises NworError, and no step is begun, unless each is a cache of this\n"
          "store, once, with a decision of its state.")
      .def("build_views", &PartialStore::BuildViews, py::arg("block_table"),
           "Builds the views of all layers for the batch; block_table [max_requests, pages]\n"
           "int32.")
      .def("refresh_layer", &PartialStore::RefreshLayer, py::arg("layer"), py::arg("query"),
           py::arg("block_table"), py::arg("query_rows") = py::none(),
           "Chooses a layer's blocks anew for requests that refresh in this step; call it when\n"
           "the K/V of re-fed rows is in the cache. query [max_requests, rows, Hq, D] after\n"
           "RoPE; query_rows [max_requests, 2] int32: which rows are the tree's (default:\n"
           "all). When it raises, those requests will be full again.")
      .def("mark_refreshed", &PartialStore::MarkRefreshed,
           "Tells that a captured graph has refreshed all layers of this step.")
      .def("blocks", &PartialStore::blocks, py::arg("layer"),
           "A layer's part of all_blocks, as PartialView takes it.")
      .def_property_readonly("all_blocks", &PartialStore::all_blocks,
                             "The blocks of all views, [L, max_requests, Hkv, blocks] int32.")
      .def_property_readonly("num_blocks", &PartialStore::num_blocks,
                             "Blocks of each view, [max_requests] int32; -1: the whole prefix.")
      .def_property_readonly("view_lens", &PartialStore::view_lens,
                             "Tokens of each view, [max_requests] int32.")
      .def_property_readonly(
          "kmax", &PartialStore::kmax,
          "The largest K of each block by channel, [L, P, blocks of a page, Hkv, D].")
      .def_property_readonly(
          "kmin", &PartialStore::kmin,
          "The smallest K of each block by channel, [L, P, blocks of a page, Hkv, D].")
      .def_property_readonly(
          "ids", &PartialStore::ids,
          "The chosen candidates, ascending, [L, max_requests, Hkv, k] int32, -1 padded.")
      .def_property_readonly("committed_lens", &PartialStore::committed_lens,
                             "Tokens committed before the step, [max_requests] int32.")
      .def_property_readonly("num_layers", &PartialStore::num_layers, "Layers of the caches.")
      .def_property_readonly("free_rows", &PartialStore::free_rows,
                             "Requests that open() has room for.")
      .def_property_readonly("bytes", &PartialStore::bytes, "Bytes held on the device.")
      .def_property_readonly("budget", &PartialStore::budget,
                             "The largest Budget a request may have.");
}

// An engine in some state, counted as long as this is there.
template <void (Counters::*add)(int64_t)>
class CountedEngine {
 public:
  CountedEngine() { (Counters::Global().*add)(1); }
  ~CountedEngine() { (Counters::Global().*add)(-1); }
  CountedEngine(const CountedEngine&) = delete;
  CountedEngine& operator=(const CountedEngine&) = delete;
};
using LossyEngine = CountedEngine<&Counters::AddLossyEngines>;
using StagingOff = CountedEngine<&Counters::AddStagingOffEngines>;

// For hosts that verify and draft with their own machinery and count for themselves.
void BindCounting(py::module_& m) {
  m.def(
      "count",
      [](std::string_view metric, int64_t amount) {
        const auto found =
            std::find_if(kCounterTexts.begin(), kCounterTexts.end(),
                         [metric](const CounterText& text) { return text.metric == metric; });
        NWOR_CHECK(found != kCounterTexts.end(), "metric: got '", metric,
                   "', expected a counter of the metrics' list");
        NWOR_CHECK(amount >= 0, "amount: got ", amount, ", expected 0 or more");
        Counters::Global().Add(static_cast<Counter>(found - kCounterTexts.begin()), amount);
      },
      py::arg("metric"), py::arg("amount"),
      "Adds an amount to a counter by its metric name, for hosts that count for\n"
      "themselves; counters of seconds take microseconds. Raises NworError for an\n"
      "unknown name or an amount below 0.");
  m.def(
      "count_full_steps",
      [](std::string_view trigger, int64_t amount) {
        const auto found =
            std::find_if(kFullTriggerTexts.begin(), kFullTriggerTexts.end(),
                         [trigger](const ReasonText& text) { return text.label == trigger; });
        NWOR_CHECK(found != kFullTriggerTexts.end(), "trigger: got '", trigger,
                   "', expected one of FULL_TRIGGERS");
        for (int64_t i = 0; i < amount; ++i) {
          Counters::Global().AddFullStep(
              static_cast<FullTrigger>(found - kFullTriggerTexts.begin()));
        }
      },
      py::arg("trigger"), py::arg("amount"),
      "Counts full steps by their trigger, a label of FULL_TRIGGERS.");
  m.def(
      "describe_engine",
      [](std::string drafter, int64_t draft_tokens, std::string mode, std::string attention) {
        Counters::Global().DescribeEngine({std::move(drafter), std::to_string(draft_tokens),
                                           std::move(mode), std::move(attention)});
      },
      py::arg("drafter"), py::arg("draft_tokens"), py::arg("mode"), py::arg("attention"),
      py::call_guard<py::gil_scoped_release>(),
      "Describes the newest engine of this process in nwor_engine_info.");
  py::class_<LossyEngine>(
      m, "LossyEngine",
      "An engine that is not lossless, counted in specpv_lossy_engines as long as it is\n"
      "there.")
      .def(py::init<>(), "Counts one more.");
  py::class_<StagingOff>(m, "StagingOff",
                         "An engine that decodes without drafts after a fault, counted in\n"
                         "nwor_staging_off_engines as long as it is there.")
      .def(py::init<>(), "Counts one more.");
  m.def(
      "count_draft_failure",
      [](std::string_view reason) {
        std::array<std::string_view, kNumDraftFailures> labels;
        for (int i = 0; i < kNumDraftFailures; ++i) labels[i] = kDraftFailureTexts[i].label;
        Counters::Global().AddDraftFailure(ParseChoice<DraftFailure>("reason", reason, labels));
      },
      py::arg("reason"),
      "Counts a failure of drafting over views by its reason; raises NworError for an\n"
      "unknown one.");
}

}  // namespace

void BindSpecPV(py::module_& m) {
  BindCounting(m);
  BindConfig(m);
  BindSteps(m);
  BindStore(m);
}

}  // namespace nwor
